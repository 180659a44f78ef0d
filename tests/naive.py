"""The slow reference: every client a Python object with its own module, one after another, as section 4 reads."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def half_precision(x: Tensor) -> Tensor:
    return x.to(torch.float16).to(x.dtype)


class NaiveRun:
    """Plain `nn.Module` copies and `torch.optim.SGD`, no vectorisation, no shared code with the engine."""

    def __init__(self, blocks, cut, scheme, lr, momentum=0.0, fraction=0.5, identical=False, fp16=False, clients=1):
        whole = nn.Sequential(*copy.deepcopy(list(blocks))).double()
        cut = len(whole) if scheme == "fl" else cut
        self.scheme, self.identical, self.fraction = scheme, identical, fraction
        self.wire = half_precision if fp16 else lambda x: x
        self.server = whole[cut:]
        self.clients = [copy.deepcopy(whole[:cut]) for _ in range(clients)]
        self.lr, self.momentum = lr, momentum
        self.client_sgd = [self.sgd(c) for c in self.clients]
        self.server_sgd = self.sgd(self.server)

    def sgd(self, module):
        params = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum) if params else None

    def round(self, batches, rho):
        """``batches[n][i]`` is (x, y) of client n at step i; only clients in the dict take part."""
        if self.scheme == "sl":
            return self._sequential(batches)
        ids = sorted(batches)
        servers = {n: copy.deepcopy(self.server) for n in ids}
        server_sgds = {n: self._copy_sgd(self.server_sgd, servers[n]) for n in ids}
        for i in range(len(batches[ids[0]])):
            smashed, back = {}, {}
            for n in ids:
                x, y = batches[n][i]
                smashed[n] = self.clients[n](x)
                seen = smashed[n].detach()
                seen = (seen if self.scheme == "fl" else self.wire(seen)).requires_grad_()
                loss = F.cross_entropy(servers[n](seen), y)
                loss.backward()
                back[n] = seen.grad
                if server_sgds[n]:
                    server_sgds[n].step()
                    server_sgds[n].zero_grad()
            received = self._feedback(back, rho)
            for n in ids:
                if self.client_sgd[n]:
                    self.client_sgd[n].zero_grad()
                    smashed[n].backward(received[n])
            if self.identical:
                for params in zip(*(self.clients[n].parameters() for n in ids), strict=True):
                    mean = sum(rho[n] * p.grad for n, p in zip(ids, params, strict=True))
                    for p in params:
                        p.grad = mean.clone()
            for n in ids:
                if self.client_sgd[n]:
                    self.client_sgd[n].step()
        self._average(
            [servers[n] for n in ids],
            [server_sgds[n] for n in ids],
            [rho[n] for n in ids],
            [self.server],
            [self.server_sgd],
        )
        if self.scheme in ("sfl", "fl"):
            self._average(
                [self.clients[n] for n in ids],
                [self.client_sgd[n] for n in ids],
                [rho[n] for n in ids],
                self.clients,
                self.client_sgd,
            )

    def averaged(self, rho) -> list[Tensor]:
        client = [
            sum(r * p.detach() for r, p in zip(rho, ps, strict=True))
            for ps in zip(*(c.parameters() for c in self.clients), strict=True)
        ]
        return client + [p.detach() for p in self.server.parameters()]

    def averaged_buffers(self, rho) -> list[Tensor]:
        client = [
            sum(r * b for r, b in zip(rho, bs, strict=True))
            for bs in zip(*(c.buffers() for c in self.clients), strict=True)
            if bs[0].is_floating_point()
        ]
        return client + [b for b in self.server.buffers() if b.is_floating_point()]

    def _feedback(self, back, rho):
        if self.scheme == "fl":
            return back
        rows = {"sfl-ga": 1.0, "epsl-cut": self.fraction}.get(self.scheme, 0.0)
        rows = round(rows * len(next(iter(back.values()))))
        mean = sum(rho[n] * g[:rows] for n, g in back.items())
        return {n: torch.cat([self.wire(mean), self.wire(g[rows:])]) for n, g in back.items()}

    def _sequential(self, batches):
        for n in sorted(batches):
            for x, y in batches[n]:
                smashed = self.clients[n](x)
                seen = self.wire(smashed.detach()).requires_grad_()
                F.cross_entropy(self.server(seen), y).backward()
                if self.server_sgd:
                    self.server_sgd.step()
                    self.server_sgd.zero_grad()
                if self.client_sgd[n]:
                    self.client_sgd[n].zero_grad()
                    smashed.backward(self.wire(seen.grad))
                    self.client_sgd[n].step()
            for other in self.clients:
                other.load_state_dict(self.clients[n].state_dict())
            for k, other in enumerate(self.clients):
                if k != n and self.client_sgd[n]:
                    self.client_sgd[k] = self._copy_sgd(self.client_sgd[n], other)

    def _copy_sgd(self, old, module):
        if old is None:
            return None
        new = self.sgd(module)
        for mine, theirs in zip(new.param_groups[0]["params"], old.param_groups[0]["params"], strict=True):
            if "momentum_buffer" in old.state[theirs] and old.state[theirs]["momentum_buffer"] is not None:
                new.state[mine]["momentum_buffer"] = old.state[theirs]["momentum_buffer"].clone()
        return new

    def _average(self, modules, sgds, rho, targets, target_sgds):
        with torch.no_grad():
            for kind in (nn.Module.parameters, nn.Module.buffers):
                for params in zip(*(kind(m) for m in modules), *(kind(t) for t in targets), strict=True):
                    if not params[0].is_floating_point():
                        continue
                    mean = sum(r * p for r, p in zip(rho, params, strict=False))
                    for target in params[len(modules) :]:
                        target.copy_(mean)
        if sgds[0] is None:
            return
        buffers = [[s.state[p].get("momentum_buffer") for p in s.param_groups[0]["params"]] for s in sgds]
        for target in target_sgds:
            for k, p in enumerate(target.param_groups[0]["params"]):
                if buffers[0][k] is not None:
                    target.state[p]["momentum_buffer"] = sum(r * b[k] for r, b in zip(rho, buffers, strict=True))


class NaiveOneServer:
    """Schemes with one server half: `splitfed-v2`, `merge-sfl`, `epsl`; and `cpsl`, by hand and by plain SGD."""

    def __init__(self, blocks, cut, lr, clients):
        whole = nn.Sequential(*copy.deepcopy(list(blocks))).double()
        self.server, self.lr = whole[cut:], lr
        self.clients = [copy.deepcopy(whole[:cut]) for _ in range(clients)]

    def descend(self, module):
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p -= self.lr * p.grad
                p.grad = None

    def mean_clients(self, rho, ids, targets=None):
        with torch.no_grad():
            for params in zip(*(c.parameters() for c in self.clients), strict=True):
                mean = sum(rho[n] * params[n] for n in ids)
                for n in range(len(self.clients)) if targets is None else targets:
                    params[n].copy_(mean)

    def splitfed_v2(self, batches, rho, orders):
        """``orders[i]``: positions among the clients, in the order of step i."""
        ids = sorted(batches)
        for i, order in enumerate(orders):
            out = {n: self.clients[n](batches[n][i][0]) for n in ids}
            for n in (ids[k] for k in order):
                seen = out[n].detach().requires_grad_()
                F.cross_entropy(self.server(seen), batches[n][i][1]).backward()
                self.descend(self.server)
                out[n].backward(seen.grad)
                self.descend(self.clients[n])
        self.mean_clients(rho, ids)

    def merge_sfl(self, batches, sizes):
        ids, total = sorted(batches), sum(sizes)
        for i in range(len(batches[ids[0]])):
            out = [self.clients[n](batches[n][i][0][: sizes[n]]) for n in ids]
            seen = [o.detach().requires_grad_() for o in out]
            y = torch.cat([batches[n][i][1][: sizes[n]] for n in ids])
            F.cross_entropy(self.server(torch.cat(seen)), y).backward()
            self.descend(self.server)
            for n in ids:
                out[n].backward(seen[n].grad * total / sizes[n])
                self.descend(self.clients[n])
        self.mean_clients([s / total for s in sizes], ids)

    def epsl(self, batches, rho, fraction):
        ids = sorted(batches)
        for i in range(len(batches[ids[0]])):
            rows = round(fraction * len(batches[ids[0]][i][1]))
            out = {n: self.clients[n](batches[n][i][0]) for n in ids}
            mean_in, mean_out, back = 0, 0, {}
            for n in ids:
                seen = out[n].detach().requires_grad_()
                logits = self.server(seen)
                (z,) = torch.autograd.grad(F.cross_entropy(logits, batches[n][i][1]), logits, retain_graph=True)
                mean_in, mean_out = mean_in + rho[n] * seen.detach()[:rows], mean_out + rho[n] * z[:rows]
                own = z.clone()
                own[:rows] = 0
                logits.backward(rho[n] * own)
                back[n] = seen.grad / rho[n]
            if rows:
                together = mean_in.requires_grad_()
                self.server(together).backward(mean_out)
                for n in ids:
                    back[n][:rows] = together.grad
            self.descend(self.server)
            for n in ids:
                out[n].backward(back[n])
                self.descend(self.clients[n])

    def cpsl(self, batches, rho, clusters):
        for ids in clusters:
            share = sum(rho[n] for n in ids)
            servers = {n: copy.deepcopy(self.server) for n in ids}
            for n in ids:
                for x, y in batches[n]:
                    F.cross_entropy(servers[n](self.clients[n](x)), y).backward()
                    self.descend(servers[n])
                    self.descend(self.clients[n])
            inside = {n: rho[n] / share for n in ids}
            self.mean_clients(inside, ids)
            with torch.no_grad():
                copies = zip(self.server.parameters(), *(servers[n].parameters() for n in ids), strict=True)
                for p, *theirs in copies:
                    p.copy_(sum(inside[n] * q for n, q in zip(ids, theirs, strict=True)))

    def averaged(self, rho):
        client = [
            sum(r * p.detach() for r, p in zip(rho, ps, strict=True))
            for ps in zip(*(c.parameters() for c in self.clients), strict=True)
        ]
        return torch.cat([p.flatten() for p in [*client, *(p.detach() for p in self.server.parameters())]])
