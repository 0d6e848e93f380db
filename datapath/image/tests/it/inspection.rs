//! What an import detects on a disk, with partition tables made by sfdisk and file systems made by mke2fs.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::fixture::{noise, store};
use headwater_image::{ChunkCache, ImportOptions, VersionReader, import, open_source};
use headwater_testkit::{run, succeed};

const EFI: &str = "type=uefi";
const BIOS_BOOT: &str = "type=21686148-6449-6E6F-744E-656564454649";

/// Imports the file. Returns why a BIOS cannot boot its version, and the remarks of the import.
fn seen(path: &Path) -> (Option<String>, Vec<String>) {
    let (_kept, store) = store();
    let options = ImportOptions::new("disk".parse().unwrap(), 0);
    let imported = import(open_source(path, None).unwrap(), &store, &options, &mut |_| {}).unwrap();
    let version = VersionReader::open(&store, imported.version.manifest, ChunkCache::new(64 << 20)).unwrap();
    (version.outline().why_bios_cannot_boot(), imported.inspection.unwrap().remarks())
}

fn partitioned(dir: &Path, label: &str, kinds: &[&str]) -> std::path::PathBuf {
    let path = dir.join("disk.raw");
    fs::write(&path, vec![0; 16 << 20]).unwrap();
    repartition(&path, label, kinds);
    path
}

fn repartition(path: &Path, label: &str, kinds: &[&str]) {
    let script = path.with_extension("script");
    let lines: Vec<String> = kinds.iter().map(|kind| format!("size=4096, {kind}\n")).collect();
    fs::write(&script, format!("label: {label}\n{}", lines.concat())).unwrap();
    let mut command = Command::new("sfdisk");
    command.arg("--quiet").arg(path).stdin(fs::File::open(script).unwrap());
    succeed("fdisk", &mut command);
}

fn with_boot_code(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[..3].copy_from_slice(&[0xeb, 0x63, 0x90]);
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_disk_that_boots_with_uefi_only_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let uefi = partitioned(dir.path(), "gpt", &[EFI, "type=linux"]);
    let (why, remarks) = seen(&uefi);
    let why = why.expect("a BIOS cannot boot it");
    assert!(why.contains("UEFI only"), "{why}");
    assert!(matches!(&remarks[..], [one] if one.contains(&why)), "{remarks:?}");
    with_boot_code(&uefi);
    assert_eq!(seen(&uefi), (None, Vec::new()));
    let both = partitioned(dir.path(), "gpt", &[EFI, BIOS_BOOT]);
    assert_eq!(seen(&both).0, None);
    let mbr = partitioned(dir.path(), "dos", &["type=ef"]);
    assert!(seen(&mbr).0.is_some());
}

/// parted writes such code with an MBR, and sfdisk leaves it there if the disk gets a GPT.
#[test]
fn generic_boot_code_of_a_gpt_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let path = partitioned(dir.path(), "dos", &["type=linux"]);
    let disk = path.to_str().unwrap();
    run("parted", "parted", &["-s", disk, "mklabel", "msdos", "mkpart", "primary", "1MiB", "8MiB"]);
    assert_eq!(seen(&path), (None, Vec::new()));
    repartition(&path, "gpt", &[EFI]);
    assert!(fs::read(&path).unwrap()[..440].iter().any(|byte| *byte != 0), "the code stays");
    let (why, remarks) = seen(&path);
    assert!(why.is_some_and(|why| why.contains("UEFI only")), "{remarks:?}");
    // The loader of syslinux looks for this.
    run("fdisk", "sfdisk", &["--quiet", "--part-attrs", disk, "1", "LegacyBIOSBootable"]);
    assert_eq!(seen(&path), (None, Vec::new()));
}

#[test]
fn a_disk_without_boot_code_is_a_remark() {
    let dir = tempfile::tempdir().unwrap();
    let (why, remarks) = seen(&partitioned(dir.path(), "gpt", &["type=linux"]));
    assert_eq!(why, None);
    assert!(matches!(&remarks[..], [one] if one.contains("no boot loader")), "{remarks:?}");
    let path = dir.path().join("ext4.raw");
    run("e2fsprogs", "mke2fs", &["-q", "-F", "-t", "ext4", path.to_str().unwrap(), "4M"]);
    let (_, remarks) = seen(&path);
    assert!(matches!(&remarks[..], [one] if one.contains("no boot loader")), "{remarks:?}");
}

#[test]
fn a_disk_without_known_content_is_a_remark() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    let mut bytes = vec![0; 4 << 20];
    noise(&mut bytes, 3);
    fs::write(&path, bytes).unwrap();
    let (why, remarks) = seen(&path);
    assert_eq!(why, None);
    assert!(matches!(&remarks[..], [one] if one.contains("no known partition table")), "{remarks:?}");
}
