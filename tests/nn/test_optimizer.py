import torch
from torch import nn

from maskgr.nn.optimizer import build_optimizer, clip_gradients


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


def steps_of(sparse, lookups):
    """The table and the norms of its gradients after a clipped step for each of the lookups."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(5, 4, sparse=sparse), "linear": nn.Linear(4, 3)})
    optimizer, norms = build_optimizer(model, 0.1, 0.5), []
    for rows in lookups:
        optimizer.zero_grad()
        model["linear"](model["table"](torch.tensor(rows))).square().sum().backward()
        norms.append(clip_gradients(model.parameters(), 1.0))
        optimizer.step()
    return model["table"].weight.detach(), torch.tensor(norms)


def test_sparse_gradients_of_all_rows_make_the_steps_of_dense_ones():
    lookups = [[0, 1, 2, 3, 4, 1], [4, 3, 2, 1, 0], [0, 0, 1, 2, 3, 4]]
    for dense, sparse in zip(steps_of(False, lookups), steps_of(True, lookups), strict=True):
        torch.testing.assert_close(sparse, dense)


def test_sparse_gradients_move_the_rows_of_the_batch_alone():
    before, _ = steps_of(True, [])
    after, _ = steps_of(True, [[1, 3], [3, 3]])
    assert (after != before).any(1).tolist() == [False, True, False, True, False]
    once, norm = steps_of(True, [[1, 3]])
    dense, dense_norm = steps_of(False, [[1, 3]])
    torch.testing.assert_close((once, norm), (dense, dense_norm))  # nothing has moved before
    assert torch.equal(once[1], after[1])  # dense moments would move it on
