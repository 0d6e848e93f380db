//! Versions as qcow2 images, with qemu-img as the reader.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use crate::fixture::{noise, partials};
use headwater_image::{Cancel, ImageErrorKind, ImportOptions, export_qcow2, import, open_file, raw_file};
use headwater_store::{Access, Hash, LocalDir};
use headwater_testkit::run;

/// A raw file of this size with noise at these places.
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

fn export(store: &LocalDir, manifest: Hash, to: &Path) -> u64 {
    let mut last = 0;
    let written = export_qcow2(store, manifest, to, &Cancel::new(), &mut |p| {
        assert!(p.done_bytes <= p.total_bytes && last <= p.done_bytes);
        last = p.done_bytes;
    });
    let written = written.unwrap();
    assert_eq!(fs::metadata(to).unwrap().len(), written);
    written
}

#[test]
fn qemu_accepts_exported_images_and_reads_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (megabyte, gigabyte) = (1 << 20, 1 << 30);
    for chunk_bytes in [4096, 65_536, 1 << 20] {
        let store_dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(store_dir.path(), Access::Write { new_chunk_bytes: chunk_bytes }).unwrap();
        for (name, size_bytes, data) in [
            ("sector", 512, &[(0, 512)][..]),
            ("empty", 5 * megabyte + 512, &[]),
            ("empty-tables", 3 * gigabyte, &[]),
            ("cluster", 65_536, &[(0, 65_536)]),
            ("odd", 9 * megabyte + 1536, &[(0, 70_000), (3 * megabyte - 700, 200_000), (9 * megabyte, 1536)]),
            ("dense", 6 * megabyte + 4096, &[(0, (6 << 20) + 4096)]),
            // Across the boundary of two L2 tables, with a missing one in between.
            (
                "tables",
                gigabyte + 700 * megabyte + 512,
                &[(0, 100), (gigabyte - 100_000, 200_000), (gigabyte + 700 * megabyte, 512)],
            ),
        ] {
            let (from, to) = (path("disk.raw"), path("disk.qcow2"));
            raw(&from, size_bytes, data);
            let manifest = imported(&store, name, &from);
            let written = export(&store, manifest, &to);
            let texts = [&from, &to].map(|path| path.to_str().unwrap().to_owned());
            run("qemu-utils", "qemu-img", &["check", "-f", "qcow2", &texts[1]]);
            run("qemu-utils", "qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &texts[0], &texts[1]]);
            let blocks = fs::metadata(&to).unwrap().blocks() * 512;
            assert!(
                blocks <= written + megabyte && written < 8 * megabyte,
                "{name}: {blocks} of {written} bytes"
            );
            // Our own reader imports the file as the same version.
            let again = ImportOptions::new("again".parse().unwrap(), 0);
            let again = import(open_file(&to).unwrap(), &store, &again, &mut |_| {}).unwrap();
            assert_eq!(again.version.manifest, manifest, "{name}");
            fs::remove_file(to).unwrap();
        }
    }
    assert_eq!(partials(dir.path()), [] as [&str; 0]);
}

#[test]
fn an_export_that_is_cancelled_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("disk.raw"), dir.path().join("disk.qcow2"));
    raw(&from, 8 << 20, &[(0, 8 << 20)]);
    let store = LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap();
    let manifest = imported(&store, "disk", &from);
    let cancel = Cancel::new();
    let stop = cancel.clone();
    let error = export_qcow2(&store, manifest, &to, &cancel, &mut |_| stop.cancel()).unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Cancelled);
    assert!(!to.exists());
    assert_eq!(partials(dir.path()), [] as [&str; 0]);
}
