"""What the next MoE layer's loads will be, while this one runs: for policies that declare ``ahead``.

A predictor reads either the gathered loads of earlier layers or batches, which every rank has anyway (LoadsPredictor),
or each rank's own tokens; then the counts of what it chose travel, beside this layer's loads (TokensPredictor).
"""

from isoload.balancing.prediction import LoadsPredictor, Predictor, TokensPredictor
from isoload.predict.accuracy import accuracy
from isoload.predict.last import Last
from isoload.predict.linear import Linear, fit
from isoload.predict.lookahead import Lookahead
from isoload.predict.path_table import PathTable, tabulate

__all__ = [
    "Last",
    "Linear",
    "LoadsPredictor",
    "Lookahead",
    "PathTable",
    "Predictor",
    "TokensPredictor",
    "accuracy",
    "fit",
    "tabulate",
]
