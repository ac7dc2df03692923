"""The tensors by name, and what each axis word means.

batch      sequences side by side (b)
position   tokens of one sequence (n; T in the lectures)
source     tokens of the sequence that a decoder reads beside its own
query      positions that look (n); key: positions looked at (m; T̄ in the lectures)
head       attention heads (h); kv_head: key/value heads, each shared by h / h_kv query heads
d_model    width of the residual stream (d); d_head of a query or key; d_value of a head's value
d_patch    numbers of one patch of a picture, where that is the source
vocabulary tokens the model knows (V)
new        positions of this pass, which a cache does not hold yet
text       rows of a batch where several share one source; source_batch: the sources they share
width      any of the widths above
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Ids = Int[Tensor, "batch position"]
Positions = Int[Tensor, "#batch position"]
QueryPositions = Int[Tensor, "#batch query"]
KeyPositions = Int[Tensor, "#batch key"]
IsToken = Bool[Tensor, "batch position"]
"""True where a real token stands, False at padding."""
SourceIds = Int[Tensor, "batch source"]
SourceIsToken = Bool[Tensor, "batch source"]
Patches = Float[Tensor, "batch source d_patch"]

Residual = Float[Tensor, "batch position d_model"]
Logits = Float[Tensor, "batch position vocabulary"]

Queries = Float[Tensor, "batch head query d_head"]
Keys = Float[Tensor, "batch kv_head key d_head"]
Values = Float[Tensor, "batch kv_head key d_value"]
HeadResults = Float[Tensor, "batch head query d_value"]
Scores = Float[Tensor, "batch head query key"]
Weights = Float[Tensor, "batch head query key"]
"""Attention weights: every row sums to 1, or is all zeros where nothing may be seen."""
ScoreBias = Float[Tensor, "#batch head #query key"]
Visible = Bool[Tensor, "#batch #head #query key"]
"""True = may look."""
