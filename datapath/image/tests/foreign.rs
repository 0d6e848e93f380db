//! VHD, VHDX and VMDK, made by qemu-img and compared with what qemu-img reads.

mod fixture;

use std::fs;
use std::path::Path;

use fixture::{files, noise, read_all, run_ok, store};
use headwater_image::{Cancel, ImageErrorKind, ImportOptions, export_raw, import, open_file};

/// A disk with data that packs, data that does not, and holes.
fn raw(path: &Path) -> Vec<u8> {
    let mut disk = vec![0; (9 << 20) + 512];
    noise(&mut disk[65_536 + 1000..2 << 20], 1);
    disk[3 << 20..4 << 20].fill(0x5a);
    noise(&mut disk[9 << 20..], 2);
    fs::write(path, &disk).unwrap();
    disk
}

fn qemu_img(dir: &Path, arguments: &[&str]) {
    let arguments: Vec<String> = arguments.iter().map(|a| a.replace("DIR", dir.to_str().unwrap())).collect();
    run_ok("qemu-img", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
}

const FORMS: [(&str, &str); 8] = [
    ("vpc", "subformat=dynamic"),
    ("vpc", "subformat=fixed"),
    ("vpc", "subformat=dynamic,force_size=on"),
    ("vhdx", "subformat=dynamic"),
    ("vhdx", "subformat=fixed"),
    ("vhdx", "subformat=dynamic,block_size=1M"),
    ("vmdk", "subformat=monolithicSparse"),
    ("vmdk", "subformat=streamOptimized"),
];

#[test]
fn each_form_reads_and_imports_as_qemu_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let disk = raw(&dir.path().join("disk.raw"));
    for (format, options) in FORMS {
        let file = dir.path().join("image");
        qemu_img(dir.path(), &["convert", "-O", format, "-o", options, "DIR/disk.raw", "DIR/image"]);
        // Some formats round the size up; qemu-img says what the disk is.
        qemu_img(dir.path(), &["convert", "-f", format, "-O", "raw", "DIR/image", "DIR/back.raw"]);
        let expected = fs::read(dir.path().join("back.raw")).unwrap();
        assert!(expected.starts_with(&disk));
        let image = open_file(&file).unwrap();
        assert!(read_all(image.as_ref()) == expected, "{format} {options}");

        let (_kept, store) = store();
        let imported =
            import(image, &store, &ImportOptions::new("disk".parse().unwrap(), 0), &mut |_| {}).unwrap();
        let out = dir.path().join("out.raw");
        export_raw(&store, imported.version.manifest, &out, &Cancel::new(), &mut |_| {}).unwrap();
        qemu_img(dir.path(), &["compare", "-f", format, "-F", "raw", "DIR/image", "DIR/out.raw"]);
    }
}

#[test]
fn a_vhd_that_was_made_larger_has_its_new_size_and_its_copy_of_the_footer_counts() {
    let dir = tempfile::tempdir().unwrap();
    let disk = raw(&dir.path().join("disk.raw"));
    qemu_img(
        dir.path(),
        &["convert", "-O", "vpc", "-o", "subformat=dynamic,force_size=on", "DIR/disk.raw", "DIR/image"],
    );
    let path = dir.path().join("image");
    let mut bytes = fs::read(&path).unwrap();
    // As Hyper-V leaves a disk that it made larger within its table: the original size stays.
    let larger = (disk.len() as u64 + (512 << 10)).to_be_bytes();
    let last = bytes.len() - 512;
    for footer in [0, last] {
        bytes[footer + 48..footer + 56].copy_from_slice(&larger);
        bytes[footer + 64..footer + 68].fill(0);
        let sum = bytes[footer..footer + 512].iter().fold(0u32, |sum, byte| sum + u32::from(*byte));
        bytes[footer + 64..footer + 68].copy_from_slice(&(!sum).to_be_bytes());
    }
    let expected = [&disk[..], &vec![0; 512 << 10]].concat();
    fs::write(&path, &bytes).unwrap();
    assert!(read_all(open_file(&path).unwrap().as_ref()) == expected);
    // A crash while the footer was moved to the new end.
    bytes[last..].fill(0xff);
    fs::write(&path, &bytes).unwrap();
    assert!(read_all(open_file(&path).unwrap().as_ref()) == expected);
    bytes[70] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let error = open_file(&path).map(drop).unwrap_err();
    assert!(error.to_string().contains("its footer is damaged"), "{error}");
}

#[test]
fn what_needs_other_files_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    raw(&dir.path().join("disk.raw"));
    let refused = |name: &str| open_file(&dir.path().join(name)).map(drop).unwrap_err();
    qemu_img(dir.path(), &["convert", "-O", "vmdk", "DIR/disk.raw", "DIR/base.vmdk"]);
    qemu_img(
        dir.path(),
        &["create", "-q", "-f", "vmdk", "-b", "DIR/base.vmdk", "-F", "vmdk", "DIR/delta.vmdk"],
    );
    let error = refused("delta.vmdk").to_string();
    assert!(error.contains("difference to a parent") && error.contains("qemu-nbd"), "{error}");
    qemu_img(
        dir.path(),
        &["convert", "-O", "vmdk", "-o", "subformat=monolithicFlat", "DIR/disk.raw", "DIR/flat.vmdk"],
    );
    let error = refused("flat.vmdk");
    assert_eq!(error.kind(), ImageErrorKind::Unsupported);
    assert!(error.to_string().contains("description of a VMDK") && error.to_string().contains("qemu-nbd"));
}

#[test]
fn damaged_files_are_errors_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    raw(&dir.path().join("disk.raw"));
    let (_kept, store) = store();
    let before = files(store.path());
    for (format, options) in FORMS {
        qemu_img(dir.path(), &["convert", "-O", format, "-o", options, "DIR/disk.raw", "DIR/image"]);
        let whole = fs::read(dir.path().join("image")).unwrap();
        let cut = dir.path().join("cut");
        for len in [100, 600, whole.len() / 2] {
            fs::write(&cut, &whole[..len]).unwrap();
            let options = ImportOptions::new("disk".parse().unwrap(), 0);
            // Half of a fixed VHD has no footer any more, and is a raw disk for all that anybody can tell.
            if format == "vpc" && whole.len() > 9 << 20 && len == whole.len() / 2 {
                continue;
            }
            let outcome = open_file(&cut).and_then(|image| import(image, &store, &options, &mut |_| {}));
            assert!(outcome.is_err(), "{format} cut to {len} bytes");
            assert_eq!(files(store.path()), before, "{format} cut to {len} bytes");
        }
        // Bytes that are changed anywhere in the tables end in bytes or an error, never in a panic.
        for round in 0..25u64 {
            let mut bytes = whole.clone();
            let tables = bytes.len().min(3 << 20) as u64;
            let at = usize::try_from(round.wrapping_mul(0x9e37_79b9_7f4a_7c15) % tables).unwrap();
            bytes[at % whole.len()] ^= 0xff;
            bytes[usize::try_from(round).unwrap() * 2] ^= 0x81;
            fs::write(&cut, &bytes).unwrap();
            if let Ok(image) = open_file(&cut)
                && image.geometry().size_bytes < 64 << 20
            {
                let mut sector = [0; 512];
                let _ = headwater_block::blocking::read(image.as_ref(), 0, &mut sector);
            }
        }
    }
}
