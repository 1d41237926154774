"""Autograd functions of a user's own that change what they are handed."""

from __future__ import annotations

import torch


class AddOne(torch.autograd.Function):
    """Changes its input in place and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x += 1
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class ScalesIncoming(torch.autograd.Function):
    """Its backward changes the gradient it is handed."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)
