//! VHD, VHDX and VMDK, made by qemu-img and compared with what qemu-img reads.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::fixture::{files, noise, read_all, store};
use headwater_block::Device;
use headwater_image::{
    Cancel, ChunkCache, FileFormat, ImageErrorKind, ImportOptions, VersionReader, export_raw, import,
    open_file, open_source,
};
use headwater_testkit::{output, run, succeed};

/// A disk with compressible data, incompressible data, and holes.
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
    run("qemu-utils", "qemu-img", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
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
fn each_format_reads_and_imports_like_in_qemu() {
    let dir = tempfile::tempdir().unwrap();
    let disk = raw(&dir.path().join("disk.raw"));
    for (format, options) in FORMS {
        let file = dir.path().join("image");
        qemu_img(dir.path(), &["convert", "-O", format, "-o", options, "DIR/disk.raw", "DIR/image"]);
        // Some formats round the size up. qemu-img reports the size of the disk.
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
        fs::remove_file(out).unwrap();
    }
}

/// A loop device, detached when dropped.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Self {
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", "--read-only"]).arg(file);
        Self(succeed("mount", &mut command).trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = output("mount", Command::new("losetup").arg("--detach").arg(&self.0));
    }
}

/// Only root may create its loop devices.
#[test]
fn a_vhd_or_vhdx_on_a_block_device_reads_like_a_file() {
    let dir = tempfile::tempdir().unwrap();
    raw(&dir.path().join("disk.raw"));
    for (n, (format, options)) in FORMS.into_iter().enumerate().filter(|(_, (format, _))| *format != "vmdk") {
        let (name, file) = (format!("DIR/image-{n}"), dir.path().join(format!("image-{n}")));
        qemu_img(dir.path(), &["convert", "-O", format, "-o", options, "DIR/disk.raw", &name]);
        let expected = read_all(open_file(&file).unwrap().as_ref());
        let device = Loop::over(&file);
        assert!(read_all(open_file(&device.0).unwrap().as_ref()) == expected, "{format} {options}");
    }
}

#[test]
fn a_qcow2_over_each_form_reads_as_qemu_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    raw(&dir.path().join("disk.raw"));
    for (n, (format, options)) in FORMS.into_iter().enumerate() {
        let (base, top) = (format!("base-{n}"), dir.path().join(format!("top-{n}.qcow2")));
        let (base_path, top_path) = (format!("DIR/{base}"), format!("DIR/top-{n}.qcow2"));
        qemu_img(dir.path(), &["convert", "-O", format, "-o", options, "DIR/disk.raw", &base_path]);
        // The header of the upper file names the format of the lower one. QEMU uses the size that the lower
        // one has in that format.
        qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "-b", &base, "-F", format, &top_path]);
        for command in ["write -P 7 100k 300k", "write -z 3500k 100k"] {
            run("qemu-utils", "qemu-io", &["-c", command, top.to_str().unwrap()]);
        }
        qemu_img(dir.path(), &["convert", "-f", "qcow2", "-O", "raw", &top_path, "DIR/back.raw"]);
        let expected = fs::read(dir.path().join("back.raw")).unwrap();
        assert!(read_all(open_file(&top).unwrap().as_ref()) == expected, "{format} {options}");
        assert_eq!(expected[200 << 10], 7);
    }
}

#[test]
fn a_backing_file_has_the_format_that_its_overlay_names() {
    let dir = tempfile::tempdir().unwrap();
    raw(&dir.path().join("disk.raw"));
    qemu_img(dir.path(), &["convert", "-O", "vhdx", "DIR/disk.raw", "DIR/base"]);
    let over = |format: &str| {
        let name = format!("{format}.qcow2");
        let to = format!("DIR/{name}");
        qemu_img(dir.path(), &["create", "-q", "-u", "-f", "qcow2", "-b", "base", "-F", format, &to, "9M"]);
        open_file(&dir.path().join(name)).map(drop)
    };
    over("vhdx").unwrap();
    for format in ["vpc", "vmdk", "qcow2"] {
        let error = over(format).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Invalid, "{format}: {error}");
        assert!(error.to_string().contains("it has another format"), "{format}: {error}");
    }
    let error = over("vdi").unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("'base' has the format vdi"), "{error}");
}

#[test]
fn an_enlarged_vhd_has_its_new_size() {
    let dir = tempfile::tempdir().unwrap();
    let disk = raw(&dir.path().join("disk.raw"));
    qemu_img(
        dir.path(),
        &["convert", "-O", "vpc", "-o", "subformat=dynamic,force_size=on", "DIR/disk.raw", "DIR/image"],
    );
    let path = dir.path().join("image");
    let mut bytes = fs::read(&path).unwrap();
    // Hyper-V leaves a disk like this after enlarging it within its table: the original size stays.
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

/// Writes the CRC-32C of `bytes` into its bytes 4 to 7, which count as zeroes for it.
fn seal(bytes: &mut [u8]) {
    bytes[4..8].fill(0);
    let bit = |crc: u32| (crc >> 1) ^ ((crc & 1) * 0x82f6_3b78);
    let sum =
        !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| bit(crc)));
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

const HEADERS: [usize; 2] = [64 << 10, 128 << 10];
const REGION_TABLES: [usize; 2] = [192 << 10, 256 << 10];
/// How the entries of the two regions begin.
const BAT: [u8; 4] = [0x66, 0x77, 0xc2, 0x2d];
const METADATA: [u8; 4] = [0x06, 0xa2, 0x7c, 0x8b];

fn entry_of(bytes: &[u8], table: usize, region: [u8; 4]) -> usize {
    (0..2).map(|n| table + 16 + 32 * n).find(|at| bytes[*at..].starts_with(&region)).unwrap()
}

/// Writes `log` into a VHDX, and refers to it in the headers.
fn with_log(vhdx: &[u8], log: &mut [u8]) -> Vec<u8> {
    let mut bytes = vhdx.to_vec();
    let id: [u8; 16] = std::array::from_fn(|n| n as u8 + 1);
    for header in HEADERS {
        bytes[header + 48..header + 64].copy_from_slice(&id);
        seal(&mut bytes[header..header + 4096]);
    }
    let len = bytes.len() as u64;
    log[..4].copy_from_slice(b"loge");
    let log_bytes = log.len() as u32;
    log[8..12].copy_from_slice(&log_bytes.to_le_bytes());
    log[16..24].copy_from_slice(&7u64.to_le_bytes());
    log[24..28].copy_from_slice(&1u32.to_le_bytes());
    log[32..48].copy_from_slice(&id);
    for at in [48, 56] {
        log[at..at + 8].copy_from_slice(&len.to_le_bytes());
    }
    log[88..96].copy_from_slice(&7u64.to_le_bytes());
    seal(log);
    let at = u64_at(&bytes, HEADERS[0] + 72) as usize;
    bytes[at..at + log.len()].copy_from_slice(log);
    bytes
}

#[test]
fn a_vhdx_with_a_log_is_refused_until_the_log_is_in_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let disk = raw(&dir.path().join("disk.raw"));
    let convert = ["convert", "-O", "vhdx", "-o", "block_size=1M", "DIR/disk.raw", "DIR/image"];
    qemu_img(dir.path(), &convert);
    let path = dir.path().join("image");
    let mut bytes = fs::read(&path).unwrap();
    let refused = || {
        let error = open_file(&path).map(drop).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("not closed cleanly"), "{error}");
        assert!(error.to_string().contains(&format!("qemu-img check -r all {}", path.display())), "{error}");
    };
    // A zero descriptor of 2^46 bytes, for which no memory suffices.
    let mut log = vec![0; 4096];
    log[64..68].copy_from_slice(b"zero");
    log[72..80].copy_from_slice(&(1u64 << 46).to_le_bytes());
    fs::write(&path, with_log(&bytes, &mut log)).unwrap();
    refused();

    // As after a power cut: only the log says that a block exists.
    let bat = u64_at(&bytes, entry_of(&bytes, REGION_TABLES[0], BAT) + 16) as usize;
    let mut log = vec![0; 8192];
    log[64..68].copy_from_slice(b"desc");
    log[68..72].copy_from_slice(&bytes[bat + 4092..bat + 4096]);
    log[72..80].copy_from_slice(&bytes[bat..bat + 8]);
    log[80..88].copy_from_slice(&(bat as u64).to_le_bytes());
    log[4096..4100].copy_from_slice(b"data");
    log[4104..8188].copy_from_slice(&bytes[bat + 8..bat + 4092]);
    log[8188..].copy_from_slice(&7u32.to_le_bytes());
    assert!(u64_at(&bytes, bat + 8) > 0);
    bytes[bat + 8..bat + 16].fill(0);
    fs::write(&path, with_log(&bytes, &mut log)).unwrap();
    refused();
    let checked =
        std::process::Command::new("qemu-img").args(["check", "-q", "-r", "all"]).arg(&path).output();
    assert!(checked.as_ref().is_ok_and(|done| done.status.success()), "{checked:?}");
    assert!(read_all(open_file(&path).unwrap().as_ref()).starts_with(&disk));
}

#[test]
fn tables_that_need_too_much_memory_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    raw(&dir.path().join("disk.raw"));
    let path = dir.path().join("image");
    let open = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        // The file is long enough for what its tables claim, and has a hole.
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 30).unwrap();
        open_file(&path).map(drop)
    };
    let refused_above = |most: &str, bytes: &[u8], says: &str| {
        let error = open(bytes).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Unsupported);
        assert!(error.to_string().contains(says) && error.to_string().contains(most), "{error}");
        assert!(error.to_string().contains("qemu-nbd"), "{error}");
    };
    let refused = |bytes: &[u8], says: &str| refused_above("67108864", bytes, says);
    qemu_img(dir.path(), &["convert", "-O", "vhdx", "DIR/disk.raw", "DIR/image"]);
    let vhdx = fs::read(&path).unwrap();
    for (region, says) in [(BAT, "table of blocks"), (METADATA, "metadata")] {
        let mut bytes = vhdx.clone();
        for table in REGION_TABLES {
            let entry = entry_of(&bytes, table, region);
            bytes[entry + 24..entry + 28].copy_from_slice(&(65u32 << 20).to_le_bytes());
            seal(&mut bytes[table..table + (64 << 10)]);
        }
        refused(&bytes, says);
    }
    // Blocks of a sector: the table is a 128th of the disk.
    qemu_img(dir.path(), &["convert", "-O", "vpc", "-o", "subformat=dynamic", "DIR/disk.raw", "DIR/image"]);
    let mut bytes = fs::read(&path).unwrap();
    let ones_complement = |part: &mut [u8], at: usize| {
        part[at..at + 4].fill(0);
        let sum = part.iter().fold(0u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
        part[at..at + 4].copy_from_slice(&(!sum).to_be_bytes());
    };
    bytes[48..56].copy_from_slice(&(65u64 << (20 + 7)).to_be_bytes());
    ones_complement(&mut bytes[..512], 64);
    bytes[512 + 28..512 + 32].copy_from_slice(&u32::MAX.to_be_bytes());
    bytes[512 + 32..512 + 36].copy_from_slice(&512u32.to_be_bytes());
    ones_complement(&mut bytes[512..1536], 36);
    refused(&bytes, "blocks of 512");

    qemu_img(dir.path(), &["convert", "-O", "vmdk", "DIR/disk.raw", "DIR/image"]);
    let mut bytes = fs::read(&path).unwrap();
    let sectors = (4u64 << 40) / 512;
    bytes[12..20].copy_from_slice(&sectors.to_le_bytes());
    open(&bytes).unwrap();
    bytes[12..20].copy_from_slice(&(sectors + 1).to_le_bytes());
    refused_above("268435456", &bytes, "grain tables");
}

/// QEMU would read zeroes where the parent has data, so its command would be wrong advice.
#[test]
fn a_vhd_with_a_parent_is_refused_without_advising_qemu() {
    let dir = tempfile::tempdir().unwrap();
    raw(&dir.path().join("disk.raw"));
    qemu_img(dir.path(), &["convert", "-O", "vpc", "DIR/disk.raw", "DIR/child.vhd"]);
    let path = dir.path().join("child.vhd");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 512;
    for at in [0, last] {
        let footer = &mut bytes[at..at + 512];
        footer[60..64].copy_from_slice(&4_u32.to_be_bytes());
        footer[64..68].fill(0);
        let sum = footer.iter().fold(0_u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
        footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    }
    fs::write(&path, &bytes).unwrap();
    let error = open_file(&path).map(drop).unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Unsupported);
    let error = error.to_string();
    assert!(error.contains("merge it into the parent first") && !error.contains("qemu-nbd"), "{error}");
}

#[test]
fn disks_in_several_files_are_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    raw(&dir.path().join("disk.raw"));
    let refused = |name: &str| open_file(&dir.path().join(name)).map(drop).unwrap_err();
    qemu_img(dir.path(), &["convert", "-O", "vmdk", "DIR/disk.raw", "DIR/base.vmdk"]);
    qemu_img(
        dir.path(),
        &["create", "-q", "-f", "vmdk", "-b", "DIR/base.vmdk", "-F", "vmdk", "DIR/delta.vmdk"],
    );
    let error = refused("delta.vmdk");
    // The disk itself is not damaged.
    assert_eq!(error.kind(), ImageErrorKind::Unsupported, "{error}");
    let error = error.to_string();
    assert!(error.contains("delta disk") && error.contains("qemu-img convert"), "{error}");
    qemu_img(
        dir.path(),
        &["convert", "-O", "vmdk", "-o", "subformat=monolithicFlat", "DIR/disk.raw", "DIR/flat.vmdk"],
    );
    let error = refused("flat.vmdk");
    assert_eq!(error.kind(), ImageErrorKind::Unsupported);
    assert!(error.to_string().contains("description of a VMDK") && error.to_string().contains("qemu-nbd"));
    assert!(error.to_string().contains("raw, qcow2, VHD, VHDX and VMDK in one file"), "{error}");
    // Formats that are served without a conversion cannot come from an NBD server.
    assert!(error.to_string().contains("'headwater image import nbd+unix:///?socket=/tmp/disk.sock --name"));
    let error = open_source(&dir.path().join("flat.vmdk"), None).map(drop).unwrap_err().to_string();
    assert!(error.contains("use nbd+unix:///?socket=/tmp/disk.sock in place of the file"), "{error}");
    // The whole disk of a machine can be a container.
    let mut luks = b"LUKS\xba\xbe\0\x02".to_vec();
    luks.resize(1 << 20, 0);
    fs::write(dir.path().join("luks.raw"), luks).unwrap();
    let error = refused("luks.raw").to_string();
    assert!(error.contains("LUKS container") && error.contains("image import --format raw"), "{error}");
    open_source(&dir.path().join("luks.raw"), Some(FileFormat::Raw)).unwrap();
}

#[test]
fn an_extent_of_a_vmdk_is_not_used_as_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |name: &str, says: &str| {
        let error = open_file(&dir.path().join(name)).map(drop).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Unsupported, "{error}");
        assert!(
            error.to_string().contains(says) && error.to_string().contains("qemu-img convert"),
            "{error}"
        );
    };
    let split =
        ["create", "-q", "-f", "vmdk", "-o", "subformat=twoGbMaxExtentSparse", "DIR/split.vmdk", "5G"];
    qemu_img(dir.path(), &split);
    refused("split-s002.vmdk", "one piece");

    // The same file with another description.
    qemu_img(dir.path(), &["create", "-q", "-f", "vmdk", "DIR/whole.vmdk", "9M"]);
    let whole = fs::read(dir.path().join("whole.vmdk")).unwrap();
    let described = |from: &str, to: &str| {
        let at = whole.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        // Zeroes follow the file.
        let end = at + whole[at..].iter().position(|byte| *byte == 0).unwrap();
        let text = [to.as_bytes(), &whole[at + from.len()..end]].concat();
        let mut bytes = whole.clone();
        bytes[at..at + text.len()].copy_from_slice(&text);
        fs::write(dir.path().join("other.vmdk"), bytes).unwrap();
    };
    let kind = "createType=\"monolithicSparse\"\n";
    described(kind, "createType=\"vmfsSparse\"          \n");
    refused("other.vmdk", "vmfsSparse");
    described(kind, &format!("{kind}parentFileNameHint=\"base.vmdk\"\n"));
    refused("other.vmdk", "base.vmdk");
}

#[test]
fn a_fixed_vhd_that_was_padded_keeps_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let disk = raw(&dir.path().join("disk.raw"));
    let convert =
        ["convert", "-O", "vpc", "-o", "subformat=fixed,force_size=on", "DIR/disk.raw", "DIR/image"];
    qemu_img(dir.path(), &convert);
    let path = dir.path().join("image");
    let sound = fs::read(&path).unwrap();
    assert_eq!(sound.len(), disk.len() + 512);
    for padding in [1, 1024, 4 << 20] {
        fs::write(&path, [&sound[..], &vec![0; padding][..]].concat()).unwrap();
        assert!(read_all(open_file(&path).unwrap().as_ref()) == disk, "{padding} bytes");
        open_source(&path, Some(FileFormat::Vhd)).unwrap();
    }
    // A raw disk that contains the bytes of a footer elsewhere is still a raw disk.
    let mut used = [&sound[..], &[0; 1024][..]].concat();
    *used.last_mut().unwrap() = 1;
    let elsewhere = [&[0; 512][..], &sound[..], &[0; 1024][..]].concat();
    let mut damaged = [&sound[..], &[0; 1024][..]].concat();
    damaged[disk.len() + 100] ^= 1;
    for bytes in [used, elsewhere, damaged] {
        fs::write(&path, &bytes).unwrap();
        assert!(read_all(open_file(&path).unwrap().as_ref()) == bytes);
    }
}

/// The marks come from the specifications of the formats. No tool here makes most of these files.
#[test]
fn containers_are_refused_by_name_and_not_read_as_raw() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let refused = |says: &str| {
        let error = open_file(&path).map(drop).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains(says), "{says}: {error}");
    };
    for (mark, says) in [
        (&b"\xbe\xba\xfe\xca\0\0\0\0\x01\0\0\0\x02"[..], "seSparse"),
        (b"COWD", "COWD"),
        (b"QFI\xfb\0\0\0\x01", "qcow version 1"),
        (b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop", "cloop"),
        (b"Bochs Virtual HD Image\0", "Bochs"),
        (b"EVF\x09\x0d\x0a\xff\0\x01\x01\0\0\0", "EWF"),
        (b"EVF2\x0d\x0a\x81\0", "EWF"),
        (b"AFF10\x0d\x0a\0", "AFF"),
        (b"\x3a\xff\x26\xed\x01\0", "Android sparse"),
        (b"VMA\0\0\0\0\x01", "Proxmox"),
        (b"QEVM\0\0\0\x03", "saved state"),
    ] {
        let mut bytes = mark.to_vec();
        bytes.resize(1 << 20, 0);
        bytes[8192..16384].fill(0xa5);
        fs::write(&path, bytes).unwrap();
        refused(says);
    }
    // A DMG has its mark in its last sector.
    let mut bytes = vec![0x5a; 1 << 20];
    bytes[(1 << 20) - 512..][..8].copy_from_slice(b"koly\0\0\0\x04");
    fs::write(&path, bytes).unwrap();
    refused("DMG");
    raw(&dir.path().join("disk.raw"));
    for (format, says) in
        [("vdi", "VDI"), ("qed", "QED"), ("parallels", "Parallels"), ("qcow", "qcow version 1")]
    {
        qemu_img(dir.path(), &["convert", "-O", format, "DIR/disk.raw", "DIR/image"]);
        refused(says);
    }
}

#[test]
fn a_vhdx_of_large_sectors_is_read_with_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    qemu_img(dir.path(), &["create", "-q", "-f", "vhdx", "DIR/image", "16M"]);
    open_file(&path).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let region = u64_at(&bytes, entry_of(&bytes, REGION_TABLES[0], METADATA) + 16) as usize;
    // The item of the logical sector size.
    let id = [0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47];
    let item = region + bytes[region..region + 4096].windows(8).position(|window| window == id).unwrap();
    let at = region + u32::from_le_bytes(bytes[item + 16..item + 20].try_into().unwrap()) as usize;
    assert_eq!(bytes[at..at + 4], 512u32.to_le_bytes());
    bytes[at..at + 4].copy_from_slice(&4096u32.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let image = open_source(&path, None).unwrap();
    assert_eq!(image.geometry().logical_block_bytes, 4096);
    let (_kept, store) = store();
    let imported =
        import(image, &store, &ImportOptions::new("disk".parse().unwrap(), 0), &mut |_| {}).unwrap();
    let version = VersionReader::open(&store, imported.version.manifest, ChunkCache::new(64 << 20)).unwrap();
    assert_eq!(version.geometry().logical_block_bytes, 4096);
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
        let is_known_by_its_end = (format, options) == ("vpc", "subformat=fixed");
        let cut = dir.path().join("cut");
        for len in [100, 600, whole.len() / 2] {
            fs::write(&cut, &whole[..len]).unwrap();
            let options = ImportOptions::new("disk".parse().unwrap(), 0);
            // Half of a fixed VHD has no footer any more, so it looks like a raw disk.
            if format == "vpc" && whole.len() > 9 << 20 && len == whole.len() / 2 {
                continue;
            }
            let outcome = open_file(&cut).and_then(|image| import(image, &store, &options, &mut |_| {}));
            let error = outcome.map(drop).expect_err(&format!("{format} cut to {len} bytes")).to_string();
            // QEMU reads none of them. The beginning of a fixed VHD is a raw disk.
            if !is_known_by_its_end {
                assert!(error.contains("damaged or truncated: copy it again"), "{format}, {len}: {error}");
                assert!(!error.contains("qemu-nbd"), "{format}, {len}: {error}");
            }
            assert!(format != "vmdk" || !error.contains("whole buffer"), "{len}: {error}");
            assert_eq!(files(store.path()), before, "{format} cut to {len} bytes");
        }
        // Changed bytes anywhere in the tables lead to bytes or to an error, never to a panic.
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
