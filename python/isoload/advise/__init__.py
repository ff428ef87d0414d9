"""Advice before one turns anything on: from a recorded trace to milliseconds on the user's GPUs."""

from isoload.advise.candidates import Candidate
from isoload.analysis.advice import Advice, Answer, Question, advise
from isoload.analysis.loads import Judged, guessed_trace, judge_by
from isoload.analysis.models import MODELS, Model, find_model
from isoload.analysis.server import ServerAdvice, advise_server, step_weights

__all__ = [
    "MODELS",
    "Advice",
    "Answer",
    "Candidate",
    "Judged",
    "Model",
    "Question",
    "ServerAdvice",
    "advise",
    "advise_server",
    "find_model",
    "guessed_trace",
    "judge_by",
    "step_weights",
]
