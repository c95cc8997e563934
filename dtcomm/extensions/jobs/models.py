"""Shapes of language models: their parameters, FLOPs and activations, computed and not looked up.

Presets are GPT-2 (Radford et al. 2019), Llama 2 and 3 (arXiv:2307.09288, 2407.21783), Mixtral (arXiv:2401.04088) and
DeepSeek-V3 (arXiv:2412.19437) without its prediction of a second token.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtcomm.extensions.jobs.hardware import not_one_of


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: ranks of the projections, and the parts of a head."""

    query_rank: int
    key_value_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    Args:
        name: Its name.
        layers: Layers.
        hidden: The width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: The width of a head, without the part that rotary positions add in `LatentAttention`.
        ffn: The inner width of a dense feed-forward layer.
        vocab: Tokens of the vocabulary.
        gated: Whether feed-forward layers have a gate (three matrices instead of two).
        biased: Whether matrices and norms have biases (GPT-2).
        tied: Whether the output matrix is the embedding.
        positions: Learned positions, 0 if positions are rotary.
        norms: Norms: ``2 * hidden`` weights a layer, and ``hidden`` at the end. False leaves them out.
        experts: Experts of a layer, 0 for a dense model.
        top_k: Experts that a token takes.
        shared: Experts that every token takes.
        expert_ffn: The inner width of an expert.
        dense_layers: Layers at the start that are dense in a model with experts.
        latent: Multi-head latent attention, if the model has it.
        context: The sequence length it was trained with, the default of ``--seq``.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    biased: bool = False
    tied: bool = False
    positions: int = 0
    norms: bool = True
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    latent: LatentAttention | None = None
    context: int = 4096

    @property
    def moe_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Parameters of the matrices of one layer's attention."""
        if self.latent is None:
            width = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
            return self.hidden * width
        a = self.latent
        query = self.hidden * a.query_rank + a.query_rank * self.heads * (self.head_dim + a.rope_dim)
        key_value = self.hidden * (a.key_value_rank + a.rope_dim)
        key_value += a.key_value_rank * self.heads * (self.head_dim + a.value_dim)
        return query + key_value + self.heads * a.value_dim * self.hidden

    def _ffn(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts that are divided among ranks, of all layers; shared experts are not."""
        return self.moe_layers * self.experts * self._ffn(self.expert_ffn)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, of the output matrix if it is another one, and of learned positions."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.dense_parameters + self.expert_parameters

    @property
    def dense_parameters(self) -> int:
        """All parameters but those of experts that are divided among ranks."""
        per_layer = self.attention_parameters + self._vectors()
        dense = (self.layers - self.moe_layers) * self._ffn(self.ffn)
        if self.biased:
            dense += (self.layers - self.moe_layers) * (self.ffn + self.hidden)
        routed = self.moe_layers * (self.experts * self.hidden + self.shared * self._ffn(self.expert_ffn))
        final = self.hidden * (2 if self.biased else 1) * self.norms
        return self.layers * per_layer + dense + routed + final + self.embedding_parameters

    def _vectors(self) -> int:
        # Norms, and the biases of attention; norms inside latent attention.
        vectors = 2 * self.hidden * (2 if self.biased else 1) * self.norms
        if self.biased:
            vectors += self.head_dim * (self.heads + 2 * self.kv_heads) + self.hidden
        if self.latent is not None:
            vectors += self.latent.query_rank + self.latent.key_value_rank
        return vectors

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: all but those of the experts that it does not take."""
        idle = self.experts - self.top_k if self.experts else 0
        return self.parameters - self.moe_layers * idle * self._ffn(self.expert_ffn)

    @property
    def layer_matmul_parameters(self) -> float:
        """Matrix parameters that a token is multiplied with in a layer, the mean over all layers."""
        dense = (self.layers - self.moe_layers) * self._ffn(self.ffn)
        routed = self.moe_layers * (self.top_k + self.shared) * self._ffn(self.expert_ffn)
        routers = self.moe_layers * self.experts * self.hidden
        return self.attention_parameters + (dense + routed + routers) / self.layers

    def attention_flops(self, seq: int, causal: bool = True) -> float:
        """FLOPs of a token's scores and weighted sum in a layer's forward; half of them if masked ones are skipped."""
        extra, value = (self.latent.rope_dim, self.latent.value_dim) if self.latent else (0, self.head_dim)
        return 2.0 * seq * self.heads * (self.head_dim + extra + value) * (0.5 if causal else 1.0)

    def flops_per_token(self, seq: int, causal: bool = True) -> float:
        """Model FLOPs of a token, forward and backward, without recomputation."""
        matrices = self.layers * self.layer_matmul_parameters + self.vocab * self.hidden
        return 6.0 * matrices + 3.0 * self.layers * self.attention_flops(seq, causal)

    @property
    def kv_width(self) -> int:
        """Elements of a token's key and value in a layer, as context parallelism sends them."""
        if self.latent is not None:
            return self.latent.key_value_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        ffn=4 * hidden, vocab=50257, gated=False, biased=True, tied=True, positions=1024, context=1024,
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int
) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads,
        ffn=ffn, vocab=vocab, context=context,
    )  # fmt: skip


def _mixtral(name: str, layers: int, hidden: int, heads: int, ffn: int, context: int) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_dim=128, ffn=ffn, vocab=32000,
        experts=8, top_k=2, expert_ffn=ffn, context=context,
    )  # fmt: skip


PRESETS = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256, 8192),
        _mixtral("mixtral-8x7b", 32, 4096, 32, 14336, 4096),
        _mixtral("mixtral-8x22b", 56, 6144, 48, 16384, 4096),
        ModelShape(
            name="deepseek-v3", layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=128, ffn=18432,
            vocab=129280, experts=256, top_k=8, shared=1, expert_ffn=2048, dense_layers=3,
            latent=LatentAttention(query_rank=1536, key_value_rank=512, rope_dim=64, value_dim=128),
        ),
    )
}  # fmt: skip
ALIASES = {"gpt2-small": "gpt2", "llama-7b": "llama2-7b", "llama-13b": "llama2-13b"}
ALIASES |= {f"llama-{size}": f"llama3-{size}" for size in ("8b", "70b", "405b")}
#: hidden / layers of a model that only has a number of parameters; GPT-3 and Llama have 65 to 130.
ASPECT = 100
MIN_PARAMETERS = 1e6


def is_preset(text: str) -> bool:
    """Return whether a text names a preset, in any case."""
    return text.lower() in PRESETS or text.lower() in ALIASES


def find_model(name: str) -> ModelShape:
    """Return a preset by its name, in any case.

    Args:
        name: One of `PRESETS` or of `ALIASES`.

    Returns:
        The shape.

    Raises:
        ValueError: There is no such preset. The message lists the names.

    Example:
        >>> from dtcomm.extensions.jobs import find_model
        >>> find_model("Llama-70B").layers
        80
    """
    key = ALIASES.get(name.lower(), name.lower())
    if key not in PRESETS:
        raise ValueError(f"model: {not_one_of(name, [*PRESETS, *ALIASES])}, or params=70B for any other size")
    return PRESETS[key]


def model_of_size(parameters: float, layers: int | None = None) -> ModelShape:
    """Return a dense shape of about so many parameters, with Llama's proportions.

    Args:
        parameters: The number of parameters, at least a million.
        layers: The number of layers; None takes ``hidden / ASPECT``.

    Returns:
        The shape. Its ``parameters`` differ from what was asked by the rounding of the widths.

    Raises:
        ValueError: The number is too small.

    Example:
        >>> from dtcomm.extensions.jobs import model_of_size
        >>> abs(model_of_size(70e9).parameters / 70e9 - 1) < 0.05
        True
    """
    if parameters < MIN_PARAMETERS:
        raise ValueError(f"params: expected at least 1M for a whole job, got {parameters:g}")
    vocab = 32000 if parameters >= 1e9 else 4096
    best: ModelShape | None = None
    for heads in range(8, 257, 8) if parameters >= 1e9 else range(1, 65):
        head_dim = 128 if parameters >= 1e9 else 64
        hidden = heads * head_dim
        # 12 h^2 a layer: 4 of attention and 8 of a gated feed-forward layer of width 8/3 h.
        count = layers or max(1, round((parameters - 2 * vocab * hidden) / (12 * hidden**2)))
        shape = _llama(
            f"params={parameters:.4g}", count, hidden, heads, heads, round(hidden / 24) * 64, vocab, 4096
        )
        if layers is None and not ASPECT / 2 <= hidden / count <= ASPECT * 2:
            continue
        if best is None or abs(shape.parameters - parameters) < abs(best.parameters - parameters):
            best = shape
    if best is None:
        raise ValueError(f"params: no shape has {parameters:g} parameters; give layers= too")
    return best
