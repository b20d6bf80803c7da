"""A mixer of one's own: linear attention in which every head forgets at a rate that depends on the token.

S_t = a_t S_{t-1} + k_t^T v_t,   o_t = q_t S_t / sqrt(K),   a_t = sigmoid(w x_t + b), one number a head

python run_suite.py check model my-mixer --plugin examples/my_mixer.py
python run_suite.py run mqar/leaderboard --plugin examples/my_mixer.py --only model.name=my-mixer,gsa,mamba
python run_suite.py report mqar/leaderboard --plugin examples/my_mixer.py
"""

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_step
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.mixer import Mixer


class MyMixer(Mixer):
    """The mixer, [B, T, D] to [B, T, D]. Its state: [B, H, K, V]."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.decay = nn.Linear(d_model, num_heads)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        return q, k, v, F.logsigmoid(self.decay(x) + 4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gated_linear_attention(*self.project(x)).flatten(-2))

    def init_state(self, batch_size: int, capacity: int) -> tuple[Tensor]:
        return (self.out.weight.new_zeros(batch_size, self.num_heads, self.head_dim, self.head_dim),)

    def step(self, x_t: Tensor, state: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        o, new = gated_linear_attention_step(*self.project(x_t), state[0])
        return self.out(o.flatten(-2)), (new,)

    def state_size(self, length: int) -> int:
        return self.num_heads * self.head_dim**2


class MyMixerConfig(BackboneConfig):
    """Linear attention with one data-dependent decay a head, from examples/my_mixer.py"""

    num_heads: int = 2

    def mixer(self, layer: int, spec: object) -> Mixer:
        return MyMixer(self.d_model, self.num_heads)


MODELS = {"my-mixer": MyMixerConfig}
