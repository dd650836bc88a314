"""Behaviours 7, 8, 10, 13, 17: what steps return, how they are decorated, and the module inside."""

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F
from client_lib import assert_close, batch, listening, make_net
from transformers.modeling_outputs import SequenceClassifierOutput

smp.init()
with listening() as lines:
    smp.init({"microbatches": 8})
assert lines == ["smp.init() was called again; the second call changes nothing."]
assert smp.num_microbatches() == 2 and smp.state.cfg.microbatches == 2
torch.cuda.set_device(smp.local_rank())
net = make_net()
x, y = batch()
with torch.no_grad():
    logits = net(x)
    parts = zip(logits.split(2), y.split(2), strict=True)
    losses = [F.cross_entropy(a, b).item() for a, b in parts]

model = smp.DistributedModel(net)
model.train()
assert model.get_module() is net and model.module is net


@smp.step()
def as_tuple(model, x, y):
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    model.backward(loss)
    return loss.item(), logits


@smp.step
def as_dict(model, batch):
    return {"logits": model(batch["x"]), "nested": {"name": "n"}}


class Trainer:
    @smp.step
    def forward_only(model, **inputs):  # noqa: N805 - as scripts have it in a class body
        logits = model(inputs["x"])
        return SequenceClassifierOutput(loss=F.cross_entropy(logits, inputs["y"]), logits=logits)

    def evaluate(self, model, **inputs):
        return self.forward_only(model, **inputs)


numbers, parts = as_tuple(model, x.cuda(), y.cuda())
assert isinstance(numbers, list)
assert_close(numbers, losses)
assert_close(sum(numbers), sum(losses))
assert_close([part.cpu().tolist() for part in parts.outputs], [p.tolist() for p in logits.split(2)])

found = as_dict(model, {"x": x.cuda()})
assert found["nested"] == {"name": "n"}
assert_close(found["logits"].concat().cpu().tolist(), logits.tolist())
assert_close(found["logits"].stack().cpu().tolist(), logits.view(2, 2, 3).tolist())

output = Trainer().evaluate(model, x=x.cuda(), y=y.cuda())
assert isinstance(output, SequenceClassifierOutput)
assert len(output["logits"].outputs) == 2
assert_close(output.loss.reduce_mean().item(), sum(losses) / 2)
assert output.loss.outputs[0].is_cuda
