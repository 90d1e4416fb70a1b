"""Uneven shares train the model that one big GPU would: real processes against one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: no training")

from ranks import run_cases  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from training_cases import (  # noqa: E402
    convolutional,
    data,
    distance,
    flat,
    flat_gradient,
    global_batches,
    mean_loss,
    perceptron,
    plan,
    train_alone,
)

from zeus_hetero import HeteroDataLoader, TrainingError  # noqa: E402

EXACT = 1e-12


@pytest.fixture(scope="module")
def two():
    return run_cases(2, ["uneven", "uneven_convolutional", "naive", "half_precision",
                         "statistics_over_ranks", "synchronised_batchnorm_is_refused",
                         "static_graph_is_refused"])  # fmt: skip


@pytest.fixture(scope="module")
def three():
    return run_cases(3, ["rank_without_samples", "only_ghosts_in_tail", "sum_of_losses", "tokens",
                         "with_penalty", "trajectory_sgd", "trajectory_adamw",
                         "new_plan_every_epoch", "options_of_ddp", "compressed",
                         "exchange_in_every_micro_batch", "no_model_with_unequal_counts",
                         "ghost_leaves_no_traces", "overflow_on_one_rank"])  # fmt: skip


@pytest.fixture(scope="module")
def four():
    return run_cases(4, ["accumulation"])


def check_equal(ranks, expected, tolerance=EXACT, key="parameters"):
    for other in ranks[1:]:
        assert torch.equal(other[key], ranks[0][key]), "the ranks' models differ"
    assert distance(ranks[0][key], expected) < tolerance


@pytest.mark.parametrize(
    ("name", "model"), [("uneven", perceptron), ("uneven_convolutional", convolutional)]
)
def test_uneven_shares_step_like_one_process(two, name, model):
    expected, _ = train_alone(model(), data(4096), (2600, 1496), steps=1)
    check_equal(two[name], expected)


def test_plain_ddp_fails_the_same_check(two):
    """Negative control: without weights the step is another one."""
    expected, _ = train_alone(perceptron(), data(4096), (2600, 1496), steps=1)
    start = flat(perceptron())
    assert distance(two["naive"][0]["parameters"] - start, expected - start) > 1e-2


def test_different_numbers_of_micro_batches(four):
    expected, _ = train_alone(convolutional(), data(1024), (137, 64, 51, 4), steps=4)
    check_equal(four["accumulation"], expected)


def test_rank_without_a_share(three):
    expected, _ = train_alone(perceptron(), data(24), (5, 0, 3), steps=3)
    check_equal(three["rank_without_samples"], expected)


def test_last_batch_smaller_than_the_number_of_ranks(three):
    expected, _ = train_alone(perceptron(), data(17), (3, 3, 2), optimizer_name="adamw", epochs=2)
    check_equal(three["only_ghosts_in_tail"], expected)


def test_sum_of_losses(three):
    def loss(model, inputs, targets):
        return F.cross_entropy(model(inputs), targets, reduction="sum") / 100

    expected, _ = train_alone(perceptron(), data(60), (7, 2, 3), loss=loss)
    check_equal(three["sum_of_losses"], expected)


def test_losses_weighted_by_tokens_with_a_rank_that_has_none(three):
    dataset = data(36)
    dataset.tensors[1][:7] = -100
    dataset.tensors[1][19:24] = -100
    expected, _ = train_alone(perceptron(), dataset, (6, 1, 5), shuffle=False)
    check_equal(three["tokens"], expected)


def test_penalty_in_the_loss_counts_once(three):
    def loss(model, inputs, targets):
        return mean_loss(model, inputs, targets) + 0.01 * sum(
            (p**2).sum() for p in model.parameters()
        )

    expected, _ = train_alone(perceptron(), data(60), (7, 2, 3), loss=loss)
    check_equal(three["with_penalty"], expected)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_trajectory_over_epochs_with_clipping(three, name):
    expected, norms = train_alone(
        perceptron(), data(62), (7, 2, 3), optimizer_name=name, epochs=3, clip=1.0
    )
    ranks = three[f"trajectory_{name}"]
    check_equal(ranks, expected)
    assert all(rank["norms"] == pytest.approx(norms, rel=1e-12) for rank in ranks)
    assert min(norms) < 1.0 < max(norms), "clipping never acted, or always"


def test_new_plan_every_epoch_keeps_the_trajectory(three):
    expected, _ = train_alone(perceptron(), data(62), (12,), optimizer_name="adamw", epochs=3)
    check_equal(three["new_plan_every_epoch"], expected)


@pytest.mark.parametrize("name", ["find_unused", "bucket_view", "synchronised_buffers"])
def test_options_of_ddp(three, name):
    expected, _ = train_alone(convolutional(), data(62), (12,), epochs=2)
    check_equal(three["options_of_ddp"], expected, key=name)


def full_gradient(dataset, dtype=torch.float64, **options):
    model = perceptron(dtype=dtype)
    batch = next(global_batches(dataset, (12,), 0, **options))
    inputs, targets = (tensor[batch] for tensor in dataset.tensors)
    mean_loss(model, inputs.to(dtype), targets).backward()
    return flat_gradient(model)


def test_hook_that_compresses_gradients(three):
    check_equal(three["compressed"], full_gradient(data(48), torch.float32), 2e-3, "gradient")


def test_exchange_in_every_micro_batch_is_exact_where_counts_are_equal(three):
    ranks = three["exchange_in_every_micro_batch"]
    check_equal(ranks, full_gradient(data(48), shuffle=False), key="gradient")


def test_unequal_counts_without_the_model_are_refused_not_hung(three):
    for rank in three["no_model_with_unequal_counts"]:
        assert "step.micro_batches(model)" in rank["error"]


def test_ghost_runs_no_layer_and_touches_neither_buffers_nor_random_numbers(three):
    idle = three["ghost_leaves_no_traces"][1]
    assert idle["layers_ran"] == 0
    assert idle["buffers_same"]
    assert idle["numbers_same"]
    assert idle["forward_is_its_own"]
    assert bool(torch.isfinite(idle["gradient"]).all())
    busy = three["ghost_leaves_no_traces"][0]
    assert busy["layers_ran"] == 1, "the hook did not see a step of a busy rank"
    assert not busy["buffers_same"]
    assert torch.equal(idle["gradient"], busy["gradient"])


def test_overflow_on_one_rank_skips_the_step_on_all(three):
    ranks = three["overflow_on_one_rank"]
    assert ranks[0]["history"] == [(False, 1024.0), (True, 512.0), (False, 512.0)]
    for rank in ranks[1:]:
        assert rank["history"] == ranks[0]["history"]
        assert torch.equal(rank["parameters"], ranks[0]["parameters"])


def test_half_precision_is_no_worse_than_in_one_process(two):
    def autocast_loss(model, inputs, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_loss(model, inputs.float(), targets)

    exact, _ = train_alone(perceptron(), data(41), (26, 15), shuffle=False)
    alone, _ = train_alone(
        perceptron(dtype=torch.float32), data(41), (26, 15), loss=autocast_loss, shuffle=False
    )
    apart = distance(two["half_precision"][0]["parameters"], exact)
    assert apart < 2 * distance(alone, exact) < 0.01


def test_layers_that_communicate_in_the_forward_pass(two):
    from rank_cases import communicating

    class Norm(torch.nn.Module):
        def forward(self, inputs):
            mean, square = inputs.mean(0), (inputs**2).mean(0)
            return (inputs - mean) / (square - mean**2 + 1e-5).sqrt()

    expected, _ = train_alone(communicating(Norm()), data(410), (205,), steps=1)
    check_equal(two["statistics_over_ranks"], expected)


def test_synchronised_batchnorm_needs_equal_counts(two):
    for rank in two["synchronised_batchnorm_is_refused"]:
        assert "3, 1 micro-batches" in rank["unequal"]
        assert "equal_micro_batches=True" in rank["unequal"]
        assert rank["made_equal"] is None


def test_static_graph_with_several_micro_batches_is_refused(two):
    for rank in two["static_graph_is_refused"]:
        assert "static_graph" in rank["several"]
        assert rank["one"] is None


# -- one process -------------------------------------------------------------------------------


def one_step(**options):
    loader = HeteroDataLoader(data(48), allocation=plan((12,), (5,)), rank=0, **options)
    return next(iter(loader))


def test_backward_returns_the_loss_as_it_was_given():
    model = perceptron()
    step = one_step()
    assert step.sizes == (4, 4, 4)
    for inputs, targets in step.micro_batches(model):
        loss = mean_loss(model, inputs, targets)
        returned = step.backward(loss)
        assert float(returned) == loss.item()
        assert not returned.requires_grad


def test_scale_serves_a_backward_call_of_ones_own():
    one, other = perceptron(), perceptron()
    step = one_step()
    for inputs, targets in step.micro_batches(one):
        step.scale(mean_loss(one, inputs, targets)).backward()
    step = one_step()
    for inputs, targets in step.micro_batches(other):
        step.backward(mean_loss(other, inputs, targets))
    assert torch.equal(flat_gradient(one), flat_gradient(other))


def test_forgotten_backward_is_an_error():
    with pytest.raises(TrainingError, match=r"micro-batch 1 of 3 went by without step\.backward"):
        for _ in one_step().micro_batches(perceptron()):
            pass


def test_steps_cannot_be_fetched_ahead():
    loader = HeteroDataLoader(data(48), allocation=plan((12,), (5,)), rank=0)
    first, second, *_ = loader
    for step in (first, second):
        with pytest.raises(TrainingError, match="the next step was asked for before"):
            next(step.micro_batches())


def test_unknown_reduction_and_missing_count_are_errors():
    step = one_step()
    for _ in step.micro_batches():
        with pytest.raises(TrainingError, match="reduction is 'median'"):
            step.weight("median")
        with pytest.raises(TrainingError, match="count_tokens"):
            step.weight("tokens")
    with pytest.raises(TrainingError, match="no micro-batch is open"):
        step.weight()


def test_step_that_is_left_early_does_not_shift_the_next():
    dataset = data(48)
    loader = HeteroDataLoader(dataset, allocation=plan((12,), (5,)), rank=0)
    batches = list(global_batches(dataset, (12,), 0))
    for batch, step in zip(batches, loader):
        inputs, _ = next(iter(step.micro_batches()))
        assert torch.equal(inputs, dataset.tensors[0][batch[:4]])
