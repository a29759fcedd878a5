import pytest
import torch
from torch import nn

from maskgr.nn.optimizer import build_optimizer, clip_gradients, schedule


def network():
    return nn.ModuleDict(
        {"table": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "linear": nn.Linear(4, 3)}
    )


def test_only_matrices_are_decayed():
    model = network()
    decayed, rest = build_optimizer(model, 0.1, 0.5).param_groups
    assert decayed["weight_decay"] == 0.5
    assert rest["weight_decay"] == 0
    assert [id(p) for p in decayed["params"]] == [id(model["linear"].weight)]
    assert len(rest["params"]) == 4


def test_every_trained_parameter_is_in_one_group():
    model = network()
    model["norm"].bias.requires_grad = False
    grouped = [p for g in build_optimizer(model, 0.1, 0.5).param_groups for p in g["params"]]
    expected = [p for p in model.parameters() if p.requires_grad]
    assert sorted(map(id, grouped)) == sorted(map(id, expected))


def test_tied_table_is_not_decayed():
    model = network()
    head = nn.Linear(4, 5, bias=False)
    head.weight = model["table"].weight
    model["head"] = head
    decayed = build_optimizer(model, 0.1, 0.5).param_groups[0]["params"]
    assert all(p is not model["table"].weight for p in decayed)


def test_decay_moves_matrices_and_leaves_tables():
    model = network()
    optimizer = build_optimizer(model, 0.1, 0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    table, matrix = model["table"].weight.clone(), model["linear"].weight.clone()
    optimizer.step()
    assert torch.equal(model["table"].weight, table)
    assert torch.allclose(model["linear"].weight, matrix * 0.95)


def test_schedule_by_hand():
    factors = [schedule(step, total=8, warmup=4) for step in range(9)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


def test_schedule_without_warmup_and_after_the_end():
    assert schedule(0, total=10, warmup=0) == 1
    assert schedule(99, total=10, warmup=0) == 0
    assert schedule(3, total=3, warmup=3) == 1


def test_clipping_scales_the_total_norm():
    model = nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[3.0, 0.0]])
    model.bias.grad = torch.tensor([4.0])
    assert clip_gradients(model, 1.0).item() == pytest.approx(5)
    assert torch.allclose(model.weight.grad, torch.tensor([[0.6, 0.0]]), atol=1e-4)
    assert torch.allclose(model.bias.grad, torch.tensor([0.8]), atol=1e-4)
    clip_gradients(model, 10.0)
    assert torch.allclose(model.bias.grad, torch.tensor([0.8]), atol=1e-4)
