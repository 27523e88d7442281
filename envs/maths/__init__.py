"""Mathematical problems with exact answers, generated or from data sets, answered in one turn."""

from envs.maths.environment import INSTRUCTION, MathsEnvironment, MathsEpisode
from envs.maths.families import FAMILIES, LEVELS
from envs.maths.generator import GENERATOR_VERSION, SPLITS, generate, stream
from envs.maths.grader import Grader, MathsUnavailableError, Verdict, answer_of
from envs.maths.numbers import Exact
from envs.maths.records import Problem, Problems, read_problems

__all__ = [
    "FAMILIES",
    "GENERATOR_VERSION",
    "INSTRUCTION",
    "LEVELS",
    "SPLITS",
    "Exact",
    "Grader",
    "MathsEnvironment",
    "MathsEpisode",
    "MathsUnavailableError",
    "Problem",
    "Problems",
    "Verdict",
    "answer_of",
    "generate",
    "read_problems",
    "stream",
]
