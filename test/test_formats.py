"""Every format: what comes back, what third parties read, what broken files do."""
import glob
import gzip
import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from scipy.spatial.transform import Rotation

from shared_data import ROBUSTNESS, needs_robustness
from spirula_gpu.compressed_ply import z_order
from spirula_gpu.config import EngineConfig, replaced
from spirula_gpu.formats import FORMATS, FormatError, format_of, read_map, read_start_map, write_map
from spirula_gpu.mapper import Mapper
from spirula_gpu.splats import SH0, Splats, colors, covariances, opacities, unit
from test_mapper import SMALL

ROOT = Path(__file__).resolve().parents[1]
SPLATS = ROBUSTNESS / "splats"
READ = [f.suffix for f in FORMATS if f.read]
fuzz = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def splats(n=300, degree=3, seed=0) -> Splats:
    rng, k = np.random.default_rng(seed), (degree + 1) ** 2
    parts = 3 * rng.normal(size=(n, 3)), rng.normal(size=(n, 4)), rng.normal(-4, 1.2, (n, 3)), rng.normal(0, 3, n), np.clip(rng.normal(size=(n, k, 3)) * 0.25, -0.99, 0.99)
    return Splats(*(x.astype(np.float32) for x in parts))


def degrees_apart(a: Splats, b: Splats) -> np.ndarray:
    same = np.abs((unit(a.quats) * unit(b.quats)).sum(1))
    return np.degrees(2 * np.arccos(np.clip(same, 0, 1)))


def written(path, s: Splats) -> Splats:
    assert write_map(path, s) == len(s.means)
    return read_map(path)


# ---- what comes back -----------------------------------------------------------------------------------------------------

BOUNDS = {  # greatest error: mean m, log scale, opacity, SH 0, other SH, rotation in degrees
    ".ply": (0, 0, 0, 0, 0, 0),
    ".splat": (0, 1e-6, 0.5 / 255 + 1e-6, 0.5 / 255 / SH0 + 1e-5, 0, 1.0),
    ".spz": (2**-13 + 1e-6, 1 / 32 + 1e-6, 0.5 / 255 + 1e-6, 0.5 / 255 / 0.15 + 1e-5, 0.5 / 128 + 1e-6, 0.25),
}


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("suffix", BOUNDS)
def test_round_trip(tmp_path, suffix, degree):
    a = splats(300, degree)
    if suffix == ".splat":
        a = a._replace(sh=np.clip(a.sh, -1.7, 1.7))  # colours within 0..1
    b = written(tmp_path / f"map{suffix}", a)
    assert b.degree == (0 if suffix == ".splat" else degree) and all(x.dtype == np.float32 and x.flags.c_contiguous for x in b.arrays)
    a = a.with_degree(b.degree)
    errors = [np.abs(a.means - b.means), np.abs(a.log_scales - b.log_scales), np.abs(opacities(a) - opacities(b)), np.abs(a.sh - b.sh)[:, :1], np.abs(a.sh - b.sh)[:, 1:]]
    assert all(e.max(initial=0) <= bound for e, bound in zip(errors, BOUNDS[suffix])), [e.max(initial=0) for e in errors]
    assert degrees_apart(a, b).max() <= BOUNDS[suffix][5] + 0.05  # arccos of float32 near 1


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_compressed_ply_round_trip(tmp_path, n, degree):
    a = splats(n, degree)
    b = written(tmp_path / "map.compressed.ply", a)
    a = a.chosen(z_order(a.means))
    for first in range(0, n, 256):  # half a step of the chunk's own span
        x, y = (s.chosen(np.s_[first:first + 256]) for s in (a, b))
        for p, q, steps in ((x.means, y.means, [2047, 1023, 2047]), (x.log_scales, y.log_scales, [2047, 1023, 2047]), (x.sh[:, 0], y.sh[:, 0], [255] * 3)):
            assert (np.abs(p - q) <= 0.501 * np.ptp(p, axis=0) / steps + 2e-6).all()
    assert np.abs(opacities(a) - opacities(b)).max() <= 0.5 / 255 + 1e-6 and degrees_apart(a, b).max() < 0.25
    assert b.degree == degree and np.abs(a.sh[:, 1:] - b.sh[:, 1:]).max(initial=0) <= 1 / 64 + 1e-6


def test_a_second_trip_through_spz_changes_nothing(tmp_path):
    once = written(tmp_path / "a.spz", splats(500))
    for x, y in zip(once, written(tmp_path / "b.spz", once)):
        np.testing.assert_array_equal(x, y)


def test_opacities_of_0_and_1_and_far_means_survive(tmp_path):
    a = splats(3, 0)._replace(logit_opacities=np.array([-90, 90, 0], np.float32), means=np.array([[5000, 0, 0], [-9000, 1, 2], [0, 0, 0]], np.float32))
    for suffix in READ:
        b = written(tmp_path / f"map{suffix}", a)
        b = b.chosen(np.argsort(b.means[:, 0])[[2, 0, 1]])
        np.testing.assert_allclose(opacities(b), [0, 1, 0.5], atol=2.1e-3)
        np.testing.assert_allclose(b.means, a.means, atol=10)
        assert np.isfinite(b.logit_opacities).all()
    b = read_map(tmp_path / "map.spz")  # fewer fractional bits
    np.testing.assert_allclose(b.means, a.means, atol=2**-10)
    with pytest.raises(FormatError, match="2.7e.07 m from the origin"):
        write_map(tmp_path / "far.spz", a._replace(means=a.means * 3000))
    assert not (tmp_path / "far.spz").exists()


def test_what_is_not_finite_is_left_out_where_it_cannot_be_said(tmp_path):
    a = splats(10, 1)
    a.means[3, 1], a.sh[5, 2, 0], a.log_scales[7, 0] = np.nan, np.inf, -np.inf
    for f in FORMATS:
        assert write_map(tmp_path / f"map{f.suffix}", a) == (7 if f.finite else 10)
    assert len(read_map(tmp_path / "map.spz").means) == 7
    with pytest.raises(FormatError, match="no.spz was not touched: not one of 2 Gaussians"):
        write_map(tmp_path / "no.spz", a.chosen([3, 5]))
    with pytest.raises(FormatError, match="there are no Gaussians"):
        write_map(tmp_path / "no.ply", a.chosen([]))


def test_the_longest_suffix_counts_and_others_are_refused_with_the_list():
    assert [format_of("A/B" + f.suffix.upper()).suffix for f in FORMATS] == [f.suffix for f in FORMATS]
    for path in ("map.txt", "map", "spz", "map.ply.zip"):
        with pytest.raises(FormatError, match=r"end in \.ply, \.compressed\.ply, \.splat, \.spz, \.npy, \.f32\.gz, \.points\.ply$"):
            format_of(path)
    for path, why in (("x.npy", "is not read"), ("x.points.ply", "is not read"), ("x.ksplat", "splat-transform"), ("x.sog", "splat-transform")):
        with pytest.raises(FormatError, match=why):
            format_of(path, reading=True)


# ---- tables --------------------------------------------------------------------------------------------------------------

def test_tables(tmp_path):
    a = splats(70_000, 2)  # more than one block
    some = np.r_[0:50, 69_950:70_000]
    R = Rotation.from_quat(a.quats[some][:, [1, 2, 3, 0]]).as_matrix()
    S = R @ (np.exp(2 * a.log_scales[some].astype(float))[:, :, None] * R.transpose(0, 2, 1))
    S = np.stack([S[:, 0, 0], S[:, 0, 1], S[:, 0, 2], S[:, 1, 1], S[:, 1, 2], S[:, 2, 2]], 1)
    np.testing.assert_allclose(covariances(a)[some], S, rtol=1e-4, atol=1e-8)
    write_map(tmp_path / "gaussians.npy", a)
    table = np.load(tmp_path / "gaussians.npy", allow_pickle=False)
    assert table.shape == (70_000, 25) and table.dtype == np.float32
    np.testing.assert_array_equal(table[:, :3], a.means)
    np.testing.assert_array_equal(table[:, 3:9], covariances(a))
    assert not table[:, 9:12].any()
    np.testing.assert_allclose(table[:, 12], opacities(a), rtol=1e-6)
    np.testing.assert_array_equal(table[:, 13:].reshape(-1, 4, 3), a.sh[:, :4])
    write_map(tmp_path / "map.f32.gz", a)
    table = np.frombuffer(gzip.decompress((tmp_path / "map.f32.gz").read_bytes()), np.float32).reshape(-1, 13)
    np.testing.assert_array_equal(table[:, :3], a.means)
    np.testing.assert_allclose(table[:, 3:6], np.clip(colors(a), 0, 1), atol=1e-6)
    np.testing.assert_array_equal(table[:, 7:], covariances(a))


# ---- third parties -------------------------------------------------------------------------------------------------------

def test_plyfile_reads_points_and_the_packed_words_of_a_compressed_ply(tmp_path):
    plyfile = pytest.importorskip("plyfile")
    a = splats(300, 1)
    write_map(tmp_path / "a.points.ply", a)
    v = plyfile.PlyData.read(tmp_path / "a.points.ply")["vertex"]
    np.testing.assert_array_equal(v["x"], a.means[:, 0])
    np.testing.assert_allclose(v["green"], 255 * np.clip(colors(a)[:, 1], 0, 1), atol=0.51)
    write_map(tmp_path / "a.compressed.ply", a)
    file = plyfile.PlyData.read(tmp_path / "a.compressed.ply")
    b, chunk, v, sh = read_map(tmp_path / "a.compressed.ply"), file["chunk"], file["vertex"], file["sh"]
    assert [e.name for e in file.elements] == ["chunk", "vertex", "sh"] and (chunk.count, v.count, sh.count) == (2, 300, 300)
    for i in (0, 17, 255, 256, 299):  # decoded by hand, as the format says
        c, p, r, color = i // 256, int(v["packed_position"][i]), int(v["packed_rotation"][i]), int(v["packed_color"][i])
        between = lambda low, high, share: (1 - share) * float(chunk[low][c]) + share * float(chunk[high][c])
        np.testing.assert_allclose(b.means[i], [between("min_x", "max_x", (p >> 21) / 2047), between("min_y", "max_y", (p >> 11 & 1023) / 1023),
                                                between("min_z", "max_z", (p & 2047) / 2047)], rtol=1e-5, atol=1e-5)
        q = [((r >> shift & 1023) / 1023 - 0.5) * 2**0.5 for shift in (20, 10, 0)]
        q.insert(r >> 30, (1 - sum(x * x for x in q)) ** 0.5)
        np.testing.assert_allclose(b.quats[i], q, atol=1e-5)
        assert b.sh[i, 0, 2] == pytest.approx((between("min_b", "max_b", (color >> 8 & 255) / 255) - 0.5) / SH0, abs=1e-5)
        assert b.sh[i, 2, 1] == pytest.approx(8 * ((int(sh["f_rest_4"][i]) + 0.5) / 256 - 0.5), abs=1e-5)


@needs_robustness
def test_files_of_others():
    """Fixtures of splat-transform (MIT): four Gaussians on a square of 1 m."""
    for path in sorted(glob.glob(f"{SPLATS}/*.sp*")):
        s = read_map(path)
        assert len(s.means) == 4 and s.degree == 0 and s.finite().all(), path
        assert set(np.abs(s.means).ravel()) == {0, 1} and np.allclose(s.log_scales, np.log(0.1), atol=0.04) and np.allclose(opacities(s), 0.9, atol=0.003), path
        assert np.allclose(np.linalg.norm(s.quats, axis=1), 1, atol=1e-5), path
    assert len(glob.glob(f"{SPLATS}/*.sp*")) == 5  # spz 2, 3, 4 and unpacked, splat
    with pytest.raises(FormatError, match="convert it first"):
        read_map(SPLATS / "minimal.ksplat")


def spz(version=3, n=2, degree=0, bits=12, flags=0, streams=0, body=None) -> bytes:
    sizes = [n * k for k in (6 if version == 1 else 9, 1, 3, 3, 4 if version > 2 else 3, 3 * ((degree + 1) ** 2 - 1))]
    return struct.pack("<4sIIBBBB", b"NGSP", version, n, degree, bits, flags, streams) + (bytes(sum(sizes)) if body is None else body)


def test_spz_versions_by_hand(tmp_path):
    """A Gaussian at (1, -2, 0.5), turned by 90 degrees about z, in each version."""
    q = np.sqrt(0.5)
    fixed = b"".join(struct.pack("<i", round(4096 * x))[:3] for x in (1, -2, 0.5))
    tail = bytes([128, 255, 0, 128, 16 * 7, 16 * 8, 16 * 9])
    first_three = bytes([128, 128, round(127.5 + 127.5 * q)])
    smallest = struct.pack("<I", 2 << 30 | 511)  # z is missing; x = y = 0, w = 1/sqrt(2)
    for version, mean, turn in ((1, np.array([1, -2, 0.5], "<f2").tobytes(), first_three), (2, fixed, first_three), (3, fixed, smallest)):
        for raw in (False, True):
            data = spz(version, 1, body=mean + tail + turn)
            path = tmp_path / f"{version}{raw}.spz"
            path.write_bytes(data if raw else gzip.compress(data))
            s = read_map(path)
            np.testing.assert_allclose(s.means, [[1, -2, 0.5]], atol=1e-6)
            np.testing.assert_allclose(s.quats, [[q, 0, 0, q]], atol=0.012)
            np.testing.assert_allclose(s.log_scales, [[-3, -2, -1]], atol=1e-6)
            np.testing.assert_allclose(s.sh[0, 0], [0.5 / 0.15, -0.5 / 0.15, 0.5 / 255 / 0.15], atol=1e-5)


# ---- broken files --------------------------------------------------------------------------------------------------------

def v4(path_of_v3: Path) -> bytes:
    """Our version 3 as version 4: the same six attributes, each a zstd frame."""
    zstd = pytest.importorskip("backports.zstd")
    data = zlib.decompress(path_of_v3.read_bytes(), wbits=31)
    _, _, n, degree, bits, flags, _ = struct.unpack("<4sIIBBBB", data[:16])
    sizes = [n * k for k in (9, 1, 3, 3, 4, 3 * ((degree + 1) ** 2 - 1)) if k]
    at = np.cumsum([16, *sizes])
    packed = [zstd.compress(data[a:b]) for a, b in zip(at[:-1], at[1:])]
    head = struct.pack("<4sIIBBBBI12x", b"NGSP", 4, n, degree, bits, flags, len(sizes), 32)
    return head + b"".join(struct.pack("<QQ", len(p), s) for p, s in zip(packed, sizes)) + b"".join(packed)


@pytest.mark.parametrize("degree", [0, 2])
def test_version_4_is_version_3_packed_otherwise(tmp_path, degree):
    write_map(tmp_path / "a.spz", splats(300, degree))
    (tmp_path / "b.spz").write_bytes(v4(tmp_path / "a.spz"))
    for x, y in zip(read_map(tmp_path / "a.spz").arrays, read_map(tmp_path / "b.spz").arrays):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name, content, message", [
    ("a.splat", b"", "0 bytes"), ("a.splat", bytes(33), "33 bytes: a .splat file has 32"),
    ("a.spz", b"", "not an .spz"), ("a.spz", b"PK\x03\x04" + bytes(40), "neither NGSP nor gzip"), ("a.spz", gzip.compress(b"NGSP"), "cut short: 4 bytes"),
    ("a.spz", gzip.compress(b"ngsp" + bytes(40)), "not an .spz"), ("a.spz", spz(5), "version 5 of .spz; versions 1 to 4"), ("a.spz", spz(degree=5), "SH degree 5 .at most 4"),
    ("a.spz", spz(bits=25), "25 fractional bits"), ("a.spz", spz(n=0), "0 Gaussians"), ("a.spz", spz(n=2**32 - 1, body=bytes(40)), "4294967295 Gaussians in 56 bytes, which can hold 1 to 2889"),
    ("a.spz", gzip.compress(spz(n=2000, body=bytes(99))), "need 40000 bytes, there are 99|2000 Gaussians in"), ("a.spz", spz() + b"x", "there are more"), ("a.spz", gzip.compress(spz() + b"x"), "there are more"),
    ("a.spz", gzip.compress(spz())[:-6], "cut short"), ("a.spz", gzip.compress(spz(4)), "version 4 inside gzip"), ("a.spz", spz(4, streams=9) + bytes(99), "9 streams .must be 5"),
    ("a.compressed.ply", b"ply\nformat binary_little_endian 1.0\nelement chunk 1\nproperty float x\nend_header\n", "its elements are chunk, must be"),
    ("a.ply", b"ply\nformat binary_little_endian 1.0\nelement chunk 1\nproperty float x\nelement vertex 1\nproperty float x\nend_header\n", "element chunk has other properties"),
    ("a.ply", b"ply\nformat binary_little_endian 1.0\nelement vertex 99999999999999999999\nproperty float x\nend_header\n", "rows of element vertex need"),
    ("a.ply", b"ply\nformat binary_little_endian 1.0\nelement vertex -1\nproperty float x\nend_header\n", "has a name and a count"),
])
def test_broken_files_are_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as error:
        read_map(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, bytes]:
    """A small file of every kind that is read."""
    folder = tmp_path_factory.mktemp("good")
    for suffix in READ:
        write_map(folder / f"a{suffix}", splats(40, 1))
    files = {suffix: (folder / f"a{suffix}").read_bytes() for suffix in READ}
    return {**files, "4.spz": v4(folder / "a.spz"), "raw.spz": zlib.decompress(files[".spz"], wbits=31)}


@pytest.mark.parametrize("kind", [*READ, "4.spz", "raw.spz"])
def test_any_truncation_is_refused(tmp_path, good, kind):
    path, data = tmp_path / f"x{kind}", good[kind]
    for n in range(0, len(data), 1 if len(data) < 600 else 7):
        path.write_bytes(data[:n])
        if kind == ".splat" and n and n % 32 == 0:
            assert len(read_map(path).means) == n // 32
            continue
        with pytest.raises(FormatError):
            read_map(path)


@pytest.mark.parametrize("kind", [*READ, "4.spz", "raw.spz"])
def test_mutations_are_refused_or_read_and_take_little_memory(tmp_path_factory, good, kind):
    path, refused, read = tmp_path_factory.mktemp("fuzz") / f"x{kind}", [], []

    @fuzz
    @given(st.lists(st.tuples(st.one_of(st.integers(0, 160), st.integers(0, len(good[kind]) - 1)), st.integers(0, 255)), min_size=1, max_size=6), st.binary(max_size=3))
    def mutate(changes, more):
        data = bytearray(good[kind])
        for at, value in changes:
            data[min(at, len(data) - 1)] = value
        path.write_bytes(bytes(data) + more)
        tracemalloc.start()
        try:
            s = read_map(path)
            n = len(s.means)
            assert [x.shape for x in s.arrays] == [(n, 3), (n, 4), (n, 3), (n,), (n, (s.degree + 1) ** 2, 3)] and all(x.dtype == np.float32 for x in s.arrays)
            read.append(n)
        except FormatError as error:
            assert "\n" not in str(error)
            refused.append(str(error))
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 8 << 20, peak
    mutate()
    assert refused  # both happen; gzip's checksum leaves little to be read


@pytest.mark.parametrize("suffix", [".ply", ".splat"])   # the others have checksums, or bits that all mean something
def test_chance_instead_of_gaussians_is_no_map(tmp_path, suffix):
    path, rng, a = tmp_path / f"x{suffix}", np.random.default_rng(0), splats(1000, 0)
    write_map(path, a)
    data = bytearray(path.read_bytes())
    rows = len(data) - {".ply": 68, ".splat": 32}[suffix] * 1000
    for share, n in ((0.05, 1000), (0.5, None), (1.0, None)):
        begin = len(data) - int((len(data) - rows) * share)
        path.write_bytes(data[:begin] + rng.bytes(len(data) - begin))
        if n:
            assert 40 <= (~read_map(path).sound()).sum() <= 51 and re.match(r"(4\d|50|51) of 1,000 Gaussians are not finite or absurd \(\d+ not finite.*with means beyond -1e.06 to 1e.06", read_map(path).complaint())
        else:
            with pytest.raises(FormatError, match=r"x.*: [\d,]+ of 1,000 Gaussians are not finite or absurd .* at most 10 % may be: the file is damaged"):
                read_map(path)
    assert not a.complaint() and not a._replace(means=a.means * 0 + 9e5, log_scales=a.log_scales * 0 - 100).complaint()


def test_an_unpacked_size_is_believed_only_as_far_as_the_file_reaches(tmp_path):
    """10 MB of zeros in 10 kB: read, as it is within deflate's ratio; what claims more than 1032 times its bytes is not unpacked."""
    path = tmp_path / "a.spz"
    path.write_bytes(gzip.compress(spz(n=500_000), 9))
    assert len(read_map(path).means) == 500_000
    path.write_bytes(gzip.compress(spz(n=900_000, body=bytes(10_000_000)), 9))
    tracemalloc.start()
    with pytest.raises(FormatError, match="900000 Gaussians in"):
        read_map(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# ---- start maps and the page ---------------------------------------------------------------------------------------------

def test_start_maps_are_checked_against_the_engine(tmp_path):
    a, config = splats(20, 1), EngineConfig(max_gaussians=20)
    write_map(tmp_path / "a.ply", a)
    assert len(read_start_map(tmp_path / "a.ply", config).means) == 20
    with pytest.raises(FormatError, match="20 Gaussians > engine.max_gaussians 19: raise it, or thin"):
        read_start_map(tmp_path / "a.ply", EngineConfig(max_gaussians=19))
    a.means[4] = np.nan
    write_map(tmp_path / "a.ply", a)
    with pytest.raises(FormatError, match="1 of 20 Gaussians are not finite or absurd .1 not finite.; `spirula convert`"):
        read_start_map(tmp_path / "a.ply", config)
    with pytest.raises(FormatError, match="none.ply: No such file"):
        read_start_map(tmp_path / "none.ply", config)


@pytest.mark.parametrize("kind", [f for f in FORMATS if f.read], ids=lambda f: f.suffix)
def test_a_file_says_that_its_map_is_for_the_mip_filter(tmp_path, kind):
    path, a = tmp_path / f"map{kind.suffix}", splats(30, 1)
    assert not written(path, a).antialiased
    plain = path.read_bytes()
    b = written(path, a._replace(antialiased=True))
    assert b.antialiased == b.with_degree(0).antialiased == b.chosen(np.s_[:5]).antialiased == kind.says_filter
    assert (path.read_bytes() != plain) == kind.says_filter
    if kind.suffix.endswith(".ply"):
        assert path.read_bytes().replace(b"comment SplatRenderMode: mip\n", b"") == plain


@pytest.mark.parametrize("comments, mip", [
    ("", False), ("comment SplatRenderMode: mip", True), ("comment splatrendermode:  MIP ", True), ("comment antialiased 1", True), ("comment antialiased 0", False),
    ("comment SplatRenderMode: default", False), ("comment antialiased 1\ncomment SplatRenderMode: default", False), ("comment made by antialiased 1", False)])
def test_comments_of_other_programs(tmp_path, comments, mip):
    path = tmp_path / "map.ply"
    write_map(path, splats(3, 0))
    head, body = path.read_bytes().split(b"element", 1)
    path.write_bytes(head + (comments + "\n" if comments else "").encode() + b"element" + body)
    assert read_map(path).antialiased == mip


def test_a_start_map_that_was_drawn_otherwise_is_told(tmp_path):
    for drawn in (False, True):
        write_map(tmp_path / "start.ply", splats(40, 2)._replace(antialiased=drawn))
        for ours in (False, True):
            mapper = Mapper(replaced(SMALL, {"train.start_map": str(tmp_path / "start.ply"), "engine.antialiased": ours}))
            mapper.tick()
            assert ("engine.antialiased" in mapper.status().hint) == (drawn != ours), mapper.status().hint


def test_the_page_lists_every_format():
    page = (ROOT / "docs" / "formats.md").read_text()
    for f in FORMATS:
        row = next((line for line in page.splitlines() if line.startswith(f"| `{f.suffix}`")), None)
        assert row and (f.loses or "nothing") in row, f"docs/formats.md: the row of {f.suffix} does not say: {f.loses or 'nothing'}"


def test_a_start_map_that_no_frame_has_joined_is_no_checkpoint(tmp_path):
    """It could not be resumed: there is nothing to train on. The map is in its file."""
    write_map("start.ply", splats(40, 2))
    mapper = Mapper(replaced(SMALL, {"train.start_map": "start.ply", "checkpoint.path": "map.ckpt", "checkpoint.period_s": 1e-6}))
    mapper.tick()
    with pytest.raises(ValueError, match="no frame has come yet, the map is as its file; map.ckpt was not touched"):
        mapper.command("save_checkpoint", "map.ckpt").result()
    assert not Path("map.ckpt").exists()
