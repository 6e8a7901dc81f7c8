"""Trainers save, resume, accumulate and find rates with our optimizer and a `GlobalSchedule`."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import fastps
import fastps.torch
from cases import case
from fastps.torch import GlobalSchedule, ParameterServerOptimizer

LENGTH = 100
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def build(ps, **options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = ParameterServerOptimizer(model.named_parameters(), ps, fastps.Adam(lr=0.1), **options)
    return model, optimizer, GlobalSchedule(lr_scheduler.CosineAnnealingLR(optimizer, LENGTH))


def rate(step):
    return pytest.approx(0.1 * (1 + math.cos(math.pi * step / LENGTH)) / 2, rel=1e-9)


def train(model, optimizer, schedule, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - DATA.tensors[1]).square().mean().backward()
        optimizer.step()
        schedule.step()


def steps_of(ps):
    return int(max(ps.state(name)["step"].max() for name in ps.names() if name.endswith("weight")))


def same(model, ps):
    return all(bool((p.detach().numpy() == ps.pull(n)).all()) for n, p in model.named_parameters())


def test_a_global_schedule_is_a_scheduler_of_torch(store, tmp_path):
    """What transformers' Trainer asks of it, at its checkpoints, too; plain schedulers take its state."""
    model, optimizer, schedule = build(store)
    assert isinstance(schedule, lr_scheduler.LRScheduler)
    assert schedule.optimizer is optimizer
    train(model, optimizer, schedule, 3)
    assert (schedule.last_epoch, schedule.base_lrs, schedule.get_last_lr()) == (3, [0.1], [rate(3)])
    torch.save(schedule.state_dict(), tmp_path / "scheduler.pt")
    saved = torch.load(tmp_path / "scheduler.pt", weights_only=True)
    assert pickle.loads(pickle.dumps(saved)) == saved == schedule.state_dict()
    train(model, optimizer, schedule, 2)
    schedule.load_state_dict(saved)
    assert schedule.get_last_lr() == [rate(5)]  # of the servers' step
    plain = lr_scheduler.CosineAnnealingLR(torch.optim.SGD(model.parameters(), lr=0.1), LENGTH)
    plain.load_state_dict(saved)
    assert (plain.last_epoch, plain.get_last_lr()) == (3, [rate(3)])
    for refused in (lambda: schedule.step(4), lambda: GlobalSchedule(schedule)):
        with pytest.raises(fastps.ConfigError):
            refused()


def test_a_trainer_that_loads_the_model_before_its_optimizer(tmp_path):
    """So do transformers' Trainer and accelerate: on new servers, the former ones, and further ones."""
    for further in (None, 0, 2):
        with case(further):
            store = fastps.Store()
            model, optimizer, schedule = build(store)
            train(model, optimizer, schedule, 3)
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            torch.save({key: part.state_dict() for key, part in parts.items()}, tmp_path / "checkpoint.pt")
            fastps.torch.save(model, optimizer, tmp_path / "run.pt")
            train(model, optimizer, schedule, further or 0)
            ps = fastps.Store() if further is None else store
            model, optimizer, schedule = build(ps)
            saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            if further:
                with pytest.raises(
                    fastps.ForeignWriteError, match=r"call fastps.torch.resume\(\) before training"
                ):
                    optimizer.load_state_dict(saved["optimizer"])
                fastps.torch.resume(model, optimizer, tmp_path / "run.pt")
            else:
                optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            assert schedule.get_last_lr() == [rate(3 + (further or 0))]
            assert same(model, ps)
            train(model, optimizer, schedule, 1)
            assert steps_of(ps) == 4 + (further or 0)


def test_accelerate(tmp_path):
    """Its own checkpoints, those of fastps, and accumulation."""
    accelerate = pytest.importorskip("accelerate")

    def prepared(ps):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, own, schedule = build(ps)
        return accelerator, own, accelerator.prepare(model, own, DataLoader(DATA, batch_size=8), schedule)

    def fit(accelerator, own, parts):
        model, optimizer, data, schedule = parts
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return own.global_step

    for way in ("state", "run"):
        for further in (None, 0, 1):
            with case(way, further):
                store = fastps.Store()
                first = prepared(store)
                assert fit(*first) == 4  # eight batches
                first[0].save_state(str(tmp_path / "state"))
                fastps.torch.save(first[2][0], first[1], tmp_path / "run.pt")
                for _ in range(further or 0):
                    fit(*first)
                ps, taken = fastps.Store() if further is None else store, 4 + 4 * (further or 0)
                second = prepared(ps)
                if way == "run":
                    fastps.torch.resume(second[2][0], second[1], tmp_path / "run.pt")
                elif further:
                    with pytest.raises(fastps.ForeignWriteError, match=r"fastps.torch.resume"):
                        second[0].load_state(str(tmp_path / "state"))
                    continue
                else:
                    second[0].load_state(str(tmp_path / "state"))
                assert second[2][3].get_last_lr() == [rate(taken)]
                assert fit(*second) == taken + 4
                assert second[2][3].get_last_lr() == [rate(taken + 4)]
                assert same(second[2][0], ps)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    """Its checkpoints, accumulation and rate finder."""
    lightning = pytest.importorskip("lightning")
    tuner = pytest.importorskip("lightning.pytorch.tuner")

    class Module(lightning.LightningModule):
        def __init__(self, ps):
            super().__init__()
            self.ps, self.net, self.lr = ps, nn.Linear(4, 1), 0.1

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            if self.ps is None:  # for the rate finder
                return torch.optim.Adam(self.parameters(), lr=self.lr)
            optimizer = ParameterServerOptimizer(self.named_parameters(), self.ps, fastps.Adam(lr=self.lr))
            schedule = GlobalSchedule(lr_scheduler.CosineAnnealingLR(optimizer, LENGTH))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def trainer(epochs):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=2,
            default_root_dir=tmp_path,
            **quiet,
        )

    data = DataLoader(DATA, batch_size=8)
    for further in (None, 0, 2):
        with case(further):
            store = fastps.Store()
            first = trainer(1)
            first.fit(Module(store), data)
            assert steps_of(store) == 4  # eight batches
            first.save_checkpoint(path := tmp_path / "run.ckpt")
            if further:
                first.fit_loop.max_epochs += further
                first.fit(first.lightning_module, data)
            ps, taken = fastps.Store() if further is None else store, steps_of(store)
            second, module = trainer(2), Module(ps)
            second.fit(module, data, ckpt_path=path)
            assert steps_of(ps) == taken + 4
            assert second.lr_scheduler_configs[0].scheduler.get_last_lr() == [rate(taken + 4)]
            assert same(module, ps)
    with pytest.raises(fastps.ForeignWriteError, match="rate finder a model with an optimizer of torch"):
        tuner.Tuner(trainer(1)).lr_find(Module(fastps.Store()), data, num_training=20)
    finder = tuner.Tuner(trainer(20)).lr_find(Module(None), data, num_training=20, early_stop_threshold=None)
    assert finder.suggestion() > 0


@pytest.mark.filterwarnings("ignore")
def test_every_epoch_of_a_trainer_has_all_portions():
    """Lightning stops after as many batches as the loader has, accelerate looks one batch ahead."""
    count = -(-len(DATA) // 8)
    for name in ("lightning", "accelerate"):
        trainer = pytest.importorskip(name)
        with case(name), fastps.Store() as ps:
            net = nn.Linear(4, 1)
            optimizer = ParameterServerOptimizer(net.named_parameters(), ps, fastps.SGD(lr=0.1))
            portions = fastps.data.Portions(ps, n=len(DATA), size=8)
            data = DataLoader(DATA, batch_sampler=portions)
            if name == "lightning":

                class Module(trainer.LightningModule):
                    def __init__(self, net=net, optimizer=optimizer):
                        super().__init__()
                        self.net, self.made = net, optimizer

                    def training_step(self, batch, index):
                        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

                    def configure_optimizers(self):
                        return self.made

                quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
                quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
                trainer.Trainer(max_epochs=3, **quiet).fit(Module(), data)
            else:
                accelerator = trainer.Accelerator(cpu=True)
                own, made, loader = accelerator.prepare(net, optimizer, data)
                for _ in range(3):
                    for x, y in loader:
                        made.zero_grad()
                        accelerator.backward(nn.functional.mse_loss(own(x), y))
                        made.step()
            assert (portions.epoch, steps_of(ps)) == (3, 3 * count)
