"""What offline.py and stream.py read alike: parameters as text, the name of the device."""
import json


def settings(text: str) -> dict:
    """`a.b=1,c.d=x` as {name: value}; values as in JSON, else text."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    bad = [name for name, equals, _ in pairs if not equals]
    if bad:
        raise ValueError(f"'{bad[0]}': must be name=value")
    return {name.strip(): _value(value.strip()) for name, _, value in pairs}


def _value(text: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def device(backend: str) -> str:
    if backend == "cuda":
        import torch
        return torch.cuda.get_device_name()
    return next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
