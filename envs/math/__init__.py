"""Math problems with exact answers, generated or from data sets, with one turn each."""

from envs.math.environment import INSTRUCTION, MathEnvironment, MathEpisode
from envs.math.families import FAMILIES, GENERATOR_VERSION, LEVELS, SPLITS, Exact, generate, stream
from envs.math.grader import AnswerCheck, Grader, MathUnavailableError, extract_answer
from envs.math.records import Problem, ProblemSet, read_problems
