//! Versions as fixed VHDs, with qemu-img as the reader.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use crate::fixture::{noise, partials};
use headwater_image::{Cancel, ImageErrorKind, ImportOptions, export_fixed_vhd, import, open_file, raw_file};
use headwater_store::{Access, Hash, LocalDir};
use headwater_testkit::run;

/// The time when the versions are made: 2001-09-09.
const CREATED_AT_MS: u64 = 1_000_000_000_000;

fn raw(path: &Path, size_bytes: u64, data: &[(u64, usize)]) {
    let file = File::create(path).unwrap();
    file.set_len(size_bytes).unwrap();
    for (at, len) in data {
        let mut bytes = vec![0; *len];
        noise(&mut bytes, at + 1);
        file.write_all_at(&bytes, *at).unwrap();
    }
}

fn imported(store: &LocalDir, name: &str, path: &Path) -> Hash {
    let options = ImportOptions::new(name.parse().unwrap(), 0);
    import(raw_file(path).unwrap(), store, &options, &mut |_| {}).unwrap().version.manifest
}

#[test]
fn qemu_reads_fixed_vhds_of_whole_mebibytes() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap();
    let path = |name: &str| dir.path().join(name);
    let (mib, gib) = (1u64 << 20, 1u64 << 30);
    for (name, size_bytes, data) in [
        ("sector", 512, &[(0, 512)][..]),
        ("empty", 5 * mib + 512, &[]),
        ("whole", 9 * mib, &[(0, 70_000), (3 * mib - 700, 200_000), (9 * mib - 512, 512)]),
        ("odd", 9 * mib + 1536, &[(0, 4096), (9 * mib, 1536)]),
        ("beyond-32-bits", 4 * gib + mib, &[(100, 100), (4 * gib, 4096)]),
        ("large", 127 * gib, &[(100, 100), (127 * gib - 4096, 4096)]),
    ] {
        let (from, to) = (path("disk.raw"), path("disk.vhd"));
        raw(&from, size_bytes, data);
        let manifest = imported(&store, name, &from);
        let written = export_fixed_vhd(&store, manifest, CREATED_AT_MS, &to, &Cancel::new(), &mut |_| {});
        let written = written.unwrap();
        let metadata = fs::metadata(&to).unwrap();
        assert_eq!((metadata.len(), written % mib), (written, 512), "{name}");
        assert!(metadata.blocks() * 512 < 2 * mib, "{name} has no holes");
        let texts = [&from, &to].map(|path| path.to_str().unwrap().to_owned());
        let info = run("qemu-utils", "qemu-img", &["info", "-f", "vpc", "--output", "json", &texts[1]]);
        let virtual_size = format!("\"virtual-size\": {}", written - 512);
        assert!(info.contains(&virtual_size), "{name}: {info}");
        // Our own reader recognises the file as a VHD.
        let disk = open_file(&to).unwrap();
        assert_eq!(disk.geometry().size_bytes, written - 512, "{name}");
        if name == "large" {
            fs::remove_file(to).unwrap();
            // The file has holes, but its format does not describe them, so all of it would be read.
            continue;
        }
        // Without -s, qemu-img considers a disk equal that is longer by zeroes.
        run("qemu-utils", "qemu-img", &["compare", "-f", "raw", "-F", "vpc", &texts[0], &texts[1]]);
        if size_bytes.is_multiple_of(mib) {
            let again = ImportOptions::new("again".parse().unwrap(), 0);
            assert_eq!(
                import(disk, &store, &again, &mut |_| {}).unwrap().version.manifest,
                manifest,
                "{name}"
            );
        }
        fs::remove_file(to).unwrap();
    }
    assert_eq!(partials(dir.path()), [] as [&str; 0]);
}

#[test]
fn two_exports_of_a_version_are_equal() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap();
    let (from, to) = (dir.path().join("disk.raw"), [dir.path().join("a.vhd"), dir.path().join("b.vhd")]);
    raw(&from, 3 << 20, &[(1 << 20, 10_000)]);
    let manifest = imported(&store, "disk", &from);
    for to in &to {
        export_fixed_vhd(&store, manifest, CREATED_AT_MS, to, &Cancel::new(), &mut |_| {}).unwrap();
    }
    assert!(fs::read(&to[0]).unwrap() == fs::read(&to[1]).unwrap());
}

#[test]
fn a_disk_too_large_for_a_vhd_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap();
    let (from, to) = (dir.path().join("disk.raw"), dir.path().join("disk.vhd"));
    raw(&from, (2040 << 30) + 512, &[]);
    let manifest = imported(&store, "disk", &from);
    let error =
        export_fixed_vhd(&store, manifest, CREATED_AT_MS, &to, &Cancel::new(), &mut |_| {}).unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Unsupported);
    assert!(error.to_string().contains("2,040 GiB"), "{error}");
    assert!(!to.exists());
    assert_eq!(partials(dir.path()), [] as [&str; 0]);
}
