"""The .ply writer against a third-party reader, and the reader against broken files."""
import os
import stat

import numpy as np
import pytest

from spirula_gpu.ply import Splats, read_ply, write_ply

plyfile = pytest.importorskip("plyfile")


def splats(n=7, degree=2, seed=0):
    rng = np.random.default_rng(seed)
    k = (degree + 1) ** 2
    return Splats(*(rng.normal(size=s).astype(np.float32) for s in ((n, 3), (n, 4), (n, 3), (n,), (n, k, 3))))


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 50])
def test_round_trip(tmp_path, n, degree):
    a = splats(n, degree)
    write_ply(tmp_path / "map.ply", a)
    for x, y in zip(a.arrays, read_ply(tmp_path / "map.ply").arrays):
        np.testing.assert_array_equal(x, y)
        assert y.dtype == np.float32 and y.flags.c_contiguous


def test_plyfile_reads_the_3dgs_names(tmp_path):
    a = splats(5, 3)
    write_ply(tmp_path / "map.ply", a)
    v = plyfile.PlyData.read(tmp_path / "map.ply")["vertex"]
    names = [p.name for p in v.properties]
    assert names[:9] == ["x", "y", "z", "nx", "ny", "nz", "f_dc_0", "f_dc_1", "f_dc_2"]
    assert names[9:54] == [f"f_rest_{i}" for i in range(45)]
    assert names[54:] == ["opacity", "scale_0", "scale_1", "scale_2", "rot_0", "rot_1", "rot_2", "rot_3"]
    np.testing.assert_array_equal(v["opacity"], a.logit_opacities)
    np.testing.assert_array_equal(v["rot_0"], a.quats[:, 0])
    np.testing.assert_array_equal(v["f_dc_1"], a.sh[:, 0, 1])
    np.testing.assert_array_equal(v["f_rest_15"], a.sh[:, 1, 1])  # channel-major: green starts at 15
    np.testing.assert_array_equal(v["f_rest_44"], a.sh[:, 15, 2])


def test_reads_what_plyfile_writes_in_any_order_and_type(tmp_path):
    a = splats(4, 0)
    columns = dict(opacity=a.logit_opacities, red=np.zeros(4), x=a.means[:, 0], y=a.means[:, 1], z=a.means[:, 2])
    columns |= {f"rot_{i}": a.quats[:, i] for i in range(4)} | {f"scale_{i}": a.log_scales[:, i] for i in range(3)}
    columns |= {f"f_dc_{i}": a.sh[:, 0, i] for i in range(3)}
    table = np.zeros(4, [(name, "u1" if name == "red" else "f8") for name in columns])
    for name, values in columns.items():
        table[name] = values
    plyfile.PlyData([plyfile.PlyElement.describe(table, "vertex")], byte_order="<").write(tmp_path / "other.ply")
    for x, y in zip(a, read_ply(tmp_path / "other.ply")):
        np.testing.assert_array_equal(x, y)


HEADER = "ply\nformat binary_little_endian 1.0\nelement vertex 1\n"


@pytest.mark.parametrize("content, message", [
    (b"", "not a .ply"),
    (b"solid cube\n", "not a .ply"),
    (b"ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nend_header\n0\n", "ascii"),
    (b"ply\nformat binary_little_endian 1.0\nelement vertex 1\n", "no end_header"),
    (b"ply\n" + b"comment " + b"x" * 5000, "no end_header"),
    (b"ply\nformat binary_little_endian 1.0\nelement face 1\nend_header\n", "must be 'vertex'"),
    (b"ply\nformat binary_little_endian 1.0\nend_header\n", "no vertex"),
    ((HEADER + "property list uchar int i\nend_header\n").encode(), "plain numbers"),
    ((HEADER + "property float x\nproperty float x\nend_header\n").encode() + bytes(8), "twice"),
    ((HEADER + "property float x\nproperty float y\nend_header\n").encode() + bytes(8), "missing: z, f_dc_0"),
    ((HEADER + "property float x\nproperty float f_rest_0\nend_header\n").encode() + bytes(8), "f_rest"),
])
def test_broken_files_are_named(tmp_path, content, message):
    path = tmp_path / "broken.ply"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_ply(path)
    assert str(path) in str(error.value)


def test_truncation_at_every_length_is_an_error(tmp_path):
    path = tmp_path / "map.ply"
    write_ply(path, splats(2, 1))
    whole = path.read_bytes()
    for n in range(0, len(whole), 7):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError):
            read_ply(path)


def test_writing_is_atomic(tmp_path):
    path = tmp_path / "map.ply"
    write_ply(path, splats(3))
    before = path.read_bytes()
    bad = splats(3)._replace(quats=np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"quats has shape \(2, 4\)"):
        write_ply(path, bad)
    with pytest.raises(FileNotFoundError):
        write_ply(tmp_path / "no_such_folder" / "map.ply", splats(3))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["map.ply"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
