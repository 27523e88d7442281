"""Mathematical problems with exact answers, generated or from data sets, answered in one turn."""

from envs.math.environment import INSTRUCTION, MathEnvironment, MathEpisode
from envs.math.families import FAMILIES, LEVELS
from envs.math.generator import GENERATOR_VERSION, SPLITS, generate, stream
from envs.math.grader import Grader, MathUnavailableError, Verdict, answer_of
from envs.math.numbers import Exact
from envs.math.records import Problem, Problems, read_problems

__all__ = [
    "FAMILIES",
    "GENERATOR_VERSION",
    "INSTRUCTION",
    "LEVELS",
    "SPLITS",
    "Exact",
    "Grader",
    "MathEnvironment",
    "MathEpisode",
    "MathUnavailableError",
    "Problem",
    "Problems",
    "Verdict",
    "answer_of",
    "generate",
    "read_problems",
    "stream",
]
