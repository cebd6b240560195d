from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch (extra 'parity') is not installed")

import benchmark_torch  # noqa: E402

from r2sm_jax.train import prepare_data  # noqa: E402


@pytest.fixture(scope="module")
def config(tiny_config):
    """Two decoder blocks, so that there are early masks, and Muon; rates rise over many steps as in training."""
    model = replace(tiny_config.model, decoder=replace(tiny_config.model.decoder, depth=2))
    loop = replace(tiny_config.train, steps=2000, batch_size=4)
    return replace(tiny_config, model=model, train=loop, optimizer=replace(tiny_config.optimizer, name="muon"))


def test_torch_computes_the_same(config):
    config = benchmark_torch.check_config(config)
    data = prepare_data(config, lambda message: None)
    batches = [next(data.batches) for _ in range(3)]  # the rate of the first step is 0
    differences = list(benchmark_torch.compare(config, batches, data.names))
    assert len(differences) == 6
    assert [row for row in differences if not row.found <= row.allowed] == []


def test_what_the_peer_does_not_have_is_refused(config, refused):
    head = replace(config, model=replace(config.model, head="linear"))
    loss = replace(config, loss=replace(config.loss, masks="sam"))
    for changed, flag in ((head, "--model.head"), (loss, "--loss.masks")):
        assert flag in refused(lambda changed=changed: benchmark_torch.check_config(changed))
