"""Short-time Fourier transforms, composed for tracing.

PyTorch's composition transposes its result in place, on which its way to make graphs functional
fails for tensors of XLA (torch 2.9, torch_xla 2.9).
"""

import torch

__all__ = ["short_time_fourier"]

_aten = torch.ops.aten
_UNSCALED, _BY_ROOT = 0, 1


def short_time_fourier(
    signal: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> torch.Tensor:
    """`aten.stft`: [..., length] -> [..., frequency, frame], complex or with a last dimension of 2.

    Raises:
        NotImplementedError: frames that are aligned to the window.
    """
    if align_to_window:
        raise NotImplementedError("stft with align_to_window=True")
    hop = hop_length or n_fft // 4
    frames = _frames(signal, n_fft, hop)
    if window is not None:
        missing = n_fft - window.shape[0]
        frames = frames * torch.nn.functional.pad(window, (missing // 2, missing - missing // 2))
    elif win_length is not None and win_length < n_fft:
        start = (n_fft - win_length) // 2
        places = torch.arange(n_fft, device=signal.device)
        frames = frames * ((places >= start) & (places < start + win_length))
    scale = _BY_ROOT if normalized else _UNSCALED
    last = [frames.dim() - 1]
    if signal.is_complex():
        spectrum = _aten._fft_c2c.default(frames, last, scale, True)
    else:
        spectrum = _aten._fft_r2c.default(frames, last, scale, onesided is not False)
    spectrum = spectrum.transpose(-1, -2)
    return spectrum if return_complex else torch.view_as_real(spectrum)


def _frames(signal: torch.Tensor, size: int, hop: int) -> torch.Tensor:
    """[..., length] -> [..., frame, place in it]."""
    count = (signal.shape[-1] - size) // hop + 1
    starts = torch.arange(count, device=signal.device) * hop
    index = starts[:, None] + torch.arange(size, device=signal.device)
    return signal.index_select(-1, index.flatten()).unflatten(-1, (count, size))
