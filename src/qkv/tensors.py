"""Named tensor types, with the meaning of each axis.

batch          sequences in the batch (b)
position       tokens of one sequence (n; T in the lectures)
source         tokens of the source sequence that a decoder cross-attends to
query, key     positions that attend (n) and positions attended to (m; T̄ in the lectures)
head, kv_head  attention heads (h) and key/value heads, each shared by h / h_kv query heads
d_model        width of the residual stream (d)
d_head         width of a query or key of one head; d_value: width of a value
d_patch        number of values in one image patch, when the source is an image
vocabulary     tokens in the vocabulary (V)
new            positions of the current forward pass that are not in the cache yet
text           batch rows when several of them share one source (beams)
source_batch   sources shared by those rows
width          any of the widths above
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Ids = Int[Tensor, "batch position"]
Positions = Int[Tensor, "#batch position"]
QueryPositions = Int[Tensor, "#batch query"]
KeyPositions = Int[Tensor, "#batch key"]
AttentionMask = Bool[Tensor, "batch position"]
"""True for real tokens and False for padding."""
SourceIds = Int[Tensor, "batch source"]
SourceAttentionMask = Bool[Tensor, "batch source"]
Patches = Float[Tensor, "batch source d_patch"]

Residual = Float[Tensor, "batch position d_model"]
Logits = Float[Tensor, "batch position vocabulary"]

Queries = Float[Tensor, "batch head query d_head"]
Keys = Float[Tensor, "batch kv_head key d_head"]
Values = Float[Tensor, "batch kv_head key d_value"]
HeadOutputs = Float[Tensor, "batch head query d_value"]
Scores = Float[Tensor, "batch head query key"]
AttentionWeights = Float[Tensor, "batch head query key"]
"""Each row sums to 1, or is all zeros if every key is masked."""
ScoreBias = Float[Tensor, "#batch head #query key"]
DenseMask = Bool[Tensor, "#batch #head #query key"]
"""True where the query may attend to the key."""

IGNORE_INDEX = -100
"""Target id for positions that do not contribute to the loss, as in `torch.nn.functional.cross_entropy`."""
