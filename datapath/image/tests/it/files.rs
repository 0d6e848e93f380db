//! Opening image files, with qemu-img and qemu-io as the other side.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::fixture::{disk_of, files, import_bytes, noise, partials, read_all, store};
use headwater_block::{ByteRange, ExtentKind, blocking};
use headwater_image::{
    Backing, Cancel, FileFormat, ImageErrorKind, ImportOptions, export_raw, import, open_file,
    open_file_backed, open_source, open_source_backed,
};
use headwater_testkit::{run, wait_until};

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// A raw disk with compressible data, incompressible data, and holes.
    fn raw(&self, name: &str) -> Vec<u8> {
        let mut disk = vec![0; (9 << 20) + 512];
        noise(&mut disk[65_536 + 1000..2 << 20], 1);
        disk[3 << 20..4 << 20].fill(0x5a);
        noise(&mut disk[9 << 20..], 2);
        fs::write(self.path(name), &disk).unwrap();
        disk
    }

    fn qemu_img(&self, arguments: &[&str]) {
        let here = self.0.path().to_str().unwrap();
        let arguments: Vec<String> = arguments.iter().map(|a| a.replace("DIR", here)).collect();
        run("qemu-utils", "qemu-img", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

fn error(path: &Path) -> (ImageErrorKind, String) {
    let error = open_file(path).map(drop).unwrap_err();
    (error.kind(), error.to_string())
}

/// QEMU with an image open for writing.
struct Writer(Child);

impl Writer {
    fn open(path: &str) -> Self {
        let mut command = Command::new("qemu-io");
        let mut child = command.arg(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // QEMU answers once the image is open.
        child.stdin.as_mut().unwrap().write_all(b"read 0 512\n").unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        Self(child)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn locks_exclude_qemu_writers_and_our_readers() {
    let dir = Dir::new();
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "DIR/base.qcow2", "4M"]);
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", "DIR/top.qcow2"]);
    let (base, top) = (dir.text("base.qcow2"), dir.text("top.qcow2"));
    for written in [&base, &top] {
        let writer = Writer::open(written);
        for opened in [open_file(&dir.path("top.qcow2")), open_source(&dir.path("top.qcow2"), None)] {
            let error = opened.map(drop).unwrap_err();
            assert_eq!(error.kind(), ImageErrorKind::Busy, "{error}");
            assert!(error.to_string().contains("open for writing"), "{error}");
        }
        drop(writer);
    }
    let writes = |path: &str| {
        let output = Command::new("qemu-io").args(["-c", "write 0 512", path]).output().unwrap();
        output.status.success()
    };
    for image in
        [open_file(&dir.path("top.qcow2")).unwrap(), open_source(&dir.path("top.qcow2"), None).unwrap()]
    {
        assert!(!writes(&base) && !writes(&top));
        dir.qemu_img(&["compare", "DIR/top.qcow2", "DIR/base.qcow2"]);
        drop(image);
    }
    // A child process that another test starts at this moment may still have the files open.
    headwater_testkit::wait_until("both can be written to", || writes(&base) && writes(&top));
}

#[test]
fn qcow2_in_all_its_forms_reads_as_the_raw_disk_it_was_made_from() {
    let dir = Dir::new();
    let disk = dir.raw("disk.raw");
    for (n, options) in [
        &["-o", "compat=0.10"][..],
        &["-o", "compat=1.1"],
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=2M"],
        &["-c"],
        &["-c", "-o", "cluster_size=4k"],
        &["-c", "-o", "compression_type=zstd"],
        &["-c", "-o", "compression_type=zstd,cluster_size=2M"],
        &["-o", "extended_l2=on"],
        &["-c", "-o", "extended_l2=on,cluster_size=128k"],
        &["-o", "preallocation=metadata"],
    ]
    .iter()
    .enumerate()
    {
        let name = format!("{n}.qcow2");
        let mut arguments = vec!["convert", "-O", "qcow2"];
        arguments.extend_from_slice(options);
        arguments.extend_from_slice(&["DIR/disk.raw", "DIR/NAME"]);
        let last = format!("DIR/{name}");
        *arguments.last_mut().unwrap() = &last;
        dir.qemu_img(&arguments);
        let image = open_file(&dir.path(&name)).unwrap();
        assert!(read_all(image.as_ref()) == disk, "{options:?}");
        // Odd offsets and lengths, too.
        for (offset, len) in [(512, 512), (65_024, 1024), (2_000_384, 200_192), (9 << 20, 512)] {
            let mut part = vec![1; len];
            blocking::read(image.as_ref(), offset, &mut part).unwrap();
            assert!(part == disk[offset as usize..offset as usize + len], "{options:?} at {offset}");
        }
        let mut at = 0;
        while at < disk.len() as u64 {
            let rest = ByteRange::new(at, disk.len() as u64 - at).unwrap();
            let extents = image.extents(rest, 3).unwrap();
            assert!((1..=3).contains(&extents.len()));
            for extent in extents {
                let range = at as usize..(at + extent.len) as usize;
                let zero = disk[range].iter().all(|byte| *byte == 0);
                assert!(extent.kind == ExtentKind::Data || zero, "{options:?} at {at}");
                at += extent.len;
            }
        }
        assert_eq!(at, disk.len() as u64);
    }
}

#[test]
fn a_chain_of_backing_files_is_imported_and_exported_bit_for_bit() {
    let dir = Dir::new();
    dir.raw("base.raw");
    fs::create_dir(dir.path("sub")).unwrap();
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "../base.raw", "DIR/sub/a.qcow2"]);
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "sub/a.qcow2", "DIR/b.qcow2", "12M"]);
    dir.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "extended_l2=on",
        "-F",
        "qcow2",
        "-b",
        "b.qcow2",
        "DIR/c.qcow2",
    ]);
    for (name, commands) in [
        ("sub/a.qcow2", &["write -P 1 100k 300k", "write -z 3500k 100k"][..]),
        ("b.qcow2", &["write -P 2 1M 512", "discard 200k 64k", "write -P 3 11M 64k"]),
        ("c.qcow2", &["write -P 4 6k 2k", "write -z 1M 4k"]),
    ] {
        for command in commands {
            run("qemu-utils", "qemu-io", &["-c", command, &dir.text(name)]);
        }
    }
    let (_store_dir, store) = store();
    let image = open_file(&dir.path("c.qcow2")).unwrap();
    assert_eq!(image.geometry().size_bytes, 12 << 20);
    let options = ImportOptions::new("chain".parse().unwrap(), 0);
    let version = import(image, &store, &options, &mut |_| {}).unwrap().version;
    let out = dir.path("out.raw");
    let mut last = 0;
    export_raw(&store, version.manifest, &out, &Cancel::new(), &mut |p| last = p.done_bytes).unwrap();
    assert_eq!(last, 12 << 20);
    run("qemu-utils", "qemu-img", &["compare", &dir.text("c.qcow2"), &dir.text("out.raw")]);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&out).unwrap());
    assert!(blocks * 512 < 5 << 20, "the export has no holes: {blocks} sectors");
}

#[test]
fn a_qcow2_truncated_anywhere_is_refused() {
    let dir = Dir::new();
    dir.raw("disk.raw");
    dir.qemu_img(&["convert", "-O", "qcow2", "DIR/disk.raw", "DIR/good.qcow2"]);
    let good = fs::read(dir.path("good.qcow2")).unwrap();
    let cut = dir.path("cut.qcow2");
    for len in [4, 71, 100, 1000, 65_536, 200_000, 300_000, good.len() / 2, good.len() - 65_536] {
        fs::write(&cut, &good[..len]).unwrap();
        let (kind, message) = error(&cut);
        assert_eq!(kind, ImageErrorKind::Damaged, "{len}: {message}");
        assert!(message.contains("cut.qcow2"), "{len}: {message}");
    }
}

#[test]
fn a_qcow2_with_one_table_in_two_places_is_refused() {
    let dir = Dir::new();
    let path = dir.path("a.qcow2");
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "DIR/a.qcow2", "1M"]);
    run("qemu-utils", "qemu-io", &["-c", "write 0 512", &dir.text("a.qcow2")]);
    open_file(&path).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let (mut l1, mut entry) = ([0; 8], [0; 8]);
    file.read_exact_at(&mut l1, 40).unwrap();
    let l1 = u64::from_be_bytes(l1);
    file.read_exact_at(&mut entry, l1).unwrap();
    file.write_all_at(&entry, l1 + 3 * 8).unwrap();
    let (kind, message) = error(&path);
    assert_eq!(kind, ImageErrorKind::Damaged, "{message}");
    assert!(message.contains("twice"), "{message}");
}

#[test]
fn a_backing_file_elsewhere_is_used_only_if_allowed() {
    let (dir, other) = (Dir::new(), Dir::new());
    other.raw("secret.raw");
    fs::create_dir(dir.path("sub")).unwrap();
    std::os::unix::fs::symlink(other.path("secret.raw"), dir.path("link.raw")).unwrap();
    let secret = other.text("secret.raw");
    for (name, backing) in [("a.qcow2", secret.as_str()), ("b.qcow2", "link.raw")] {
        let target = format!("DIR/{name}");
        dir.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", backing, &target]);
    }
    // The path is not in the first image, but in its backing file.
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "a.qcow2", "DIR/c.qcow2"]);
    for (name, named) in [("a.qcow2", secret.as_str()), ("b.qcow2", "link.raw"), ("c.qcow2", &secret)] {
        let (kind, message) = error(&dir.path(name));
        assert_eq!(kind, ImageErrorKind::Invalid, "{message}");
        assert!(message.contains(named) && message.contains("--backing"), "{message}");
        assert!(open_source(&dir.path(name), Some(FileFormat::Qcow2)).is_err());
        let image = open_source_backed(&dir.path(name), None, Backing::Anywhere).unwrap();
        assert!(read_all(image.as_ref()) == fs::read(&secret).unwrap());
        assert!(open_file_backed(&dir.path(name), Backing::Anywhere).is_ok());
    }
    dir.qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "/dev/zero", "DIR/d.qcow2", "1M"]);
    assert!(error(&dir.path("d.qcow2")).1.contains("not a regular file"));
}

#[test]
fn a_file_without_a_name_is_no_backing_file() {
    let dir = Dir::new();
    let deleted = dir.path("deleted");
    let unnamed: [File; 3] = [
        File::options().read(true).write(true).create_new(true).open(&deleted).unwrap(),
        tempfile::tempfile_in(dir.0.path()).unwrap(),
        rustix::fs::memfd_create("secret", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into(),
    ];
    fs::remove_file(deleted).unwrap();
    let secret = vec![7u8; 1 << 20];
    for (n, file) in unnamed.iter().enumerate() {
        file.write_all_at(&secret, 0).unwrap();
        let (backing, target) = (format!("/proc/self/fd/{}", file.as_raw_fd()), format!("DIR/{n}.qcow2"));
        dir.qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", &backing, &target, "1M"]);
        let path = dir.path(&format!("{n}.qcow2"));
        for opened in [open_file(&path), open_source(&path, None)] {
            let error = opened.map(drop).unwrap_err();
            assert_eq!(error.kind(), ImageErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains("--backing"), "{error}");
        }
        // The file could be read.
        assert!(read_all(open_file_backed(&path, Backing::Anywhere).unwrap().as_ref()) == secret);
    }
}

#[test]
fn a_link_that_changes_during_an_open_exposes_no_other_file() {
    let (dir, other) = (Dir::new(), Dir::new());
    let (mine, secret) = (dir.path("mine.raw"), other.path("secret.raw"));
    fs::write(&mine, [1u8; 512]).unwrap();
    fs::write(&secret, [7u8; 512]).unwrap();
    let link_to = |target: &Path| {
        symlink(target, dir.path("new")).unwrap();
        fs::rename(dir.path("new"), dir.path("link.raw")).unwrap();
    };
    link_to(&mine);
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "link.raw", "DIR/a.qcow2"]);
    let read = || open_file(&dir.path("a.qcow2")).map(|image| read_all(image.as_ref()));
    std::thread::scope(|scope| {
        // The thread ends by itself, even if an assertion fails meanwhile.
        let changes = scope.spawn(|| {
            for target in [&secret, &mine].repeat(10_000) {
                link_to(target);
            }
        });
        while !changes.is_finished() {
            if let Ok(bytes) = read() {
                assert!(bytes == [1; 512]);
            }
        }
    });
    assert!(read().unwrap() == [1; 512]);
}

#[test]
fn a_missing_or_circular_backing_file_is_named() {
    let dir = Dir::new();
    dir.raw("base.raw");
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "DIR/a.qcow2"]);
    fs::rename(dir.path("base.raw"), dir.path("moved.raw")).unwrap();
    let (kind, message) = error(&dir.path("a.qcow2"));
    assert_eq!(kind, ImageErrorKind::Invalid);
    assert!(message.contains("backing file 'base.raw'") && message.contains("No such file"), "{message}");

    dir.qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "b.qcow2", "DIR/b.qcow2", "1M"]);
    assert!(error(&dir.path("b.qcow2")).1.contains("circle"));
    dir.qemu_img(&[
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "nbd://host/x",
        "DIR/n.qcow2",
        "1M",
    ]);
    let (kind, message) = error(&dir.path("n.qcow2"));
    assert_eq!(kind, ImageErrorKind::Unsupported);
    assert!(message.contains("not a local file") && message.contains("qemu-nbd"), "{message}");
}

#[test]
fn a_backing_file_with_qemu_options_is_refused() {
    let dir = Dir::new();
    dir.raw("base.raw");
    let options = r#"json:{"driver":"raw","file":{"driver":"file","filename":"base.raw"}}"#;
    dir.qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", options, "DIR/j.qcow2", "1M"]);
    let (kind, message) = error(&dir.path("j.qcow2"));
    assert_eq!(kind, ImageErrorKind::Unsupported);
    assert!(message.contains("QEMU options") && message.contains("qemu-img rebase -u -b FILE"), "{message}");
    // QEMU would open the file that the options name.
    assert!(!message.contains("qemu-nbd"), "{message}");
}

#[test]
fn encrypted_images_are_refused_at_every_place_of_a_chain() {
    let dir = Dir::new();
    // QEMU makes the AES image. The LUKS image is a plain image with the number of the method (QCOW2, bytes
    // 32 to 35) in its header: to make a real one, QEMU measures the processor, which fails if the clock of
    // used time is too coarse.
    let aes = ["-o", "encrypt.format=aes,encrypt.key-secret=s"];
    dir.qemu_img(
        &[
            &["create", "-q", "--object", "secret,id=s,data=geheim", "-f", "qcow2"],
            &aes[..],
            &["DIR/aes.qcow2", "1M"],
        ]
        .concat(),
    );
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "DIR/luks.qcow2", "1M"]);
    File::options().write(true).open(dir.path("luks.qcow2")).unwrap().write_all_at(&[2], 35).unwrap();
    for name in ["aes", "luks"] {
        let (base, top) = (format!("{name}.qcow2"), format!("DIR/over-{name}.qcow2"));
        dir.qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", &base, &top, "1M"]);
    }
    for (name, blamed) in [
        ("aes.qcow2", "aes.qcow2"),
        ("over-aes.qcow2", "aes.qcow2"),
        ("luks.qcow2", "luks.qcow2"),
        ("over-luks.qcow2", "luks.qcow2"),
    ] {
        let (kind, message) = error(&dir.path(name));
        assert_eq!(kind, ImageErrorKind::Unsupported);
        assert!(message.contains(blamed) && message.contains("encrypted"), "{message}");
    }
}

#[test]
fn a_data_file_and_a_corrupt_mark_are_refused() {
    let dir = Dir::new();
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "-o", "data_file=DIR/data", "DIR/ext.qcow2", "1M"]);
    let (kind, message) = error(&dir.path("ext.qcow2"));
    assert_eq!(kind, ImageErrorKind::Unsupported);
    assert!(message.contains("another file"), "{message}");
    // QEMU opens any path that the image names.
    let (warning, advice) = (message.find("First check which file that is"), message.find("qemu-nbd"));
    assert!(warning.is_some() && warning < advice, "{message}");
    dir.qemu_img(&["create", "-q", "-f", "qcow2", "DIR/bad.qcow2", "1M"]);
    let file = File::options().write(true).open(dir.path("bad.qcow2")).unwrap();
    file.write_all_at(&[2], 79).unwrap();
    assert!(error(&dir.path("bad.qcow2")).1.contains("corrupt"));
}

#[test]
fn a_damaged_compressed_cluster_is_an_error_and_the_rest_is_read() {
    let dir = Dir::new();
    let mut disk = vec![0; 1 << 20];
    for (n, part) in disk.chunks_mut(64).enumerate() {
        part[..8].copy_from_slice(&(n as u64).to_le_bytes());
    }
    fs::write(dir.path("disk.raw"), &disk).unwrap();
    for kind in ["zlib", "zstd"] {
        let option = format!("compression_type={kind}");
        dir.qemu_img(&["convert", "-c", "-O", "qcow2", "-o", &option, "DIR/disk.raw", "DIR/c.qcow2"]);
        let path = dir.path("c.qcow2");
        let len = fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(len - 4096).unwrap();
        let outcome = open_file(&path).and_then(|image| {
            let mut out = vec![0; 1 << 20];
            blocking::read(image.as_ref(), 0, &mut out[..65_536])?;
            assert!(out[..65_536] == disk[..65_536]);
            Ok(blocking::read(image.as_ref(), 0, &mut out)?)
        });
        assert_eq!(outcome.unwrap_err().kind(), ImageErrorKind::Damaged, "{kind}");
    }
}

#[test]
fn a_zstd_cluster_of_two_frames_reads_as_qemu_reads_it() {
    let dir = Dir::new();
    let disk = [vec![1u8; 32 << 10], vec![2; 32 << 10]].concat();
    fs::write(dir.path("disk.raw"), &disk).unwrap();
    let option = "compression_type=zstd";
    dir.qemu_img(&["convert", "-c", "-O", "qcow2", "-o", option, "DIR/disk.raw", "DIR/c.qcow2"]);
    let file = File::options().read(true).write(true).open(dir.path("c.qcow2")).unwrap();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    // From the header to the L1 table, to the L2 table, to the cluster.
    let entry = word(word(word(40)) & 0x00ff_ffff_ffff_fe00);
    assert_ne!(entry & (1 << 62), 0);
    let at = entry & ((1 << 54) - 1);
    let frames: Vec<u8> =
        disk.chunks(32 << 10).flat_map(|half| zstd::bulk::compress(half, 3).unwrap()).collect();
    // The cluster has at least the sector in which it begins.
    assert!(at % 512 + frames.len() as u64 <= 512);
    file.write_all_at(&frames, at).unwrap();
    dir.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "DIR/c.qcow2", "DIR/back.raw"]);
    assert!(fs::read(dir.path("back.raw")).unwrap() == disk);
    assert!(read_all(open_file(&dir.path("c.qcow2")).unwrap().as_ref()) == disk);
}

#[test]
fn other_formats_are_refused_by_name_with_advice() {
    let dir = Dir::new();
    dir.raw("disk.raw");
    for (format, says) in [("vdi", "VDI"), ("qed", "QED")] {
        let name = format!("disk.{format}");
        dir.qemu_img(&["convert", "-O", format, "DIR/disk.raw", &format!("DIR/{name}")]);
        let (kind, message) = error(&dir.path(&name));
        assert_eq!(kind, ImageErrorKind::Unsupported);
        assert!(message.contains(says) && message.contains("qemu-nbd"), "{message}");
    }
    run("gzip", "gzip", &["--keep", &dir.text("disk.raw")]);
    assert!(error(&dir.path("disk.raw.gz")).1.contains("gunzip"));
    run("tar", "tar", &["-cf", &dir.text("x.tar"), "-C", &dir.text(""), "disk.raw"]);
    assert!(error(&dir.path("x.tar")).1.contains("tar archive"));
    let text = "#!/bin/sh\n# No disk at all, although of a good size.\n".repeat(512);
    fs::write(dir.path("text"), &text[..512 * 20]).unwrap();
    assert!(error(&dir.path("text")).1.contains("it is text"));
    // If its format is given as raw, it is used as it is.
    assert!(open_source(&dir.path("text"), Some(FileFormat::Raw)).is_ok());
    assert!(open_source(&dir.path("text"), Some(FileFormat::Qcow2)).is_err());
}

#[test]
fn a_given_format_is_not_guessed() {
    let dir = Dir::new();
    let mut disk = vec![0; 1 << 20];
    noise(&mut disk[..70_000], 1);
    fs::write(dir.path("disk.raw"), &disk).unwrap();
    // A guest may write this to its disk: the start of a qcow2 image that names a file of the host.
    fs::write(dir.path("secret"), vec![7; 1 << 20]).unwrap();
    dir.qemu_img(&["create", "-f", "qcow2", "-F", "raw", "-b", "DIR/secret", "DIR/trap.raw"]);
    let trap = File::options().write(true).open(dir.path("trap.raw")).unwrap();
    trap.set_len(1 << 20).unwrap();
    let read = |name: &str, format| read_all(open_source(&dir.path(name), Some(format)).unwrap().as_ref());
    let bytes = fs::read(dir.path("trap.raw")).unwrap();
    assert!(bytes.starts_with(b"QFI\xfb") && read("trap.raw", FileFormat::Raw) == bytes);
    assert!(read_all(open_file(&dir.path("trap.raw")).unwrap().as_ref()) == vec![7; 1 << 20]);

    let all = [
        ("raw", FileFormat::Raw),
        ("qcow2", FileFormat::Qcow2),
        ("vpc", FileFormat::Vhd),
        ("vhdx", FileFormat::Vhdx),
        ("vmdk", FileFormat::Vmdk),
    ];
    for (name, format) in all {
        let file = format!("a.{name}");
        dir.qemu_img(&["convert", "-f", "raw", "-O", name, "DIR/disk.raw", &format!("DIR/{file}")]);
        assert!(read(&file, format).starts_with(&disk), "{name}");
        for (_, other) in all.iter().filter(|(_, other)| *other != format && *other != FileFormat::Raw) {
            let refused = open_source(&dir.path(&file), Some(*other)).map(drop).unwrap_err();
            assert_eq!(refused.kind(), ImageErrorKind::Invalid, "{name} as {other:?}");
            assert!(refused.to_string().contains("another format"), "{refused}");
        }
    }
}

#[test]
fn files_that_cannot_be_disks_are_refused_with_the_reason() {
    let dir = Dir::new();
    let mut odd = vec![0; 1000];
    noise(&mut odd, 1);
    fs::write(dir.path("odd"), &odd).unwrap();
    File::create(dir.path("empty")).unwrap();
    symlink("nowhere", dir.path("dangling")).unwrap();
    run("coreutils", "mkfifo", &[&dir.text("fifo")]);
    for (name, says) in [
        ("odd", "not qcow2, VHD, VHDX or VMDK, and its size of 1000 bytes is not a multiple of 512"),
        ("empty", "it is empty"),
        ("", "it is a directory"),
        ("dangling", "No such file"),
        ("fifo", "neither a file nor a block device"),
    ] {
        let (_, message) = error(&dir.path(name));
        assert!(message.contains(says), "{name}: {message}");
    }
}

#[test]
fn a_failed_export_keeps_the_existing_file() {
    let dir = Dir::new();
    let disk = dir.raw("disk.raw");
    let (store_dir, store) = store();
    let before = files(store_dir.path());
    let options = ImportOptions::new("disk".parse().unwrap(), 0);
    let version =
        import(open_file(&dir.path("disk.raw")).unwrap(), &store, &options, &mut |_| {}).unwrap().version;
    assert_ne!(files(store_dir.path()), before);
    fs::write(dir.path("out"), b"old").unwrap();
    let cancel = Cancel::new();
    let stop = cancel.clone();
    let error = export_raw(&store, version.manifest, &dir.path("new"), &cancel, &mut |_| stop.cancel());
    assert_eq!(error.unwrap_err().kind(), ImageErrorKind::Cancelled);
    assert!(!dir.path("new").exists());
    // The export replaces neither a file that existed before nor one that is created meanwhile.
    let comes = dir.path("comes");
    let mut come = |_| fs::write(&comes, b"old").unwrap();
    for (name, error) in [
        ("out", export_raw(&store, version.manifest, &dir.path("out"), &Cancel::new(), &mut |_| {})),
        ("comes", export_raw(&store, version.manifest, &comes, &Cancel::new(), &mut come)),
    ] {
        assert_eq!(error.unwrap_err().kind(), ImageErrorKind::Busy, "{name}");
        assert_eq!(fs::read(dir.path(name)).unwrap(), b"old", "{name}");
    }
    assert_eq!(partials(dir.0.path()), [] as [&str; 0]);
    export_raw(&store, version.manifest, &dir.path("new"), &Cancel::new(), &mut |_| {}).unwrap();
    assert!(fs::read(dir.path("new")).unwrap() == disk);
    assert_eq!(partials(dir.0.path()), [] as [&str; 0]);
    let bad = export_raw(&store, version.manifest, &dir.path("slash/"), &Cancel::new(), &mut |_| {});
    assert_eq!(bad.unwrap_err().kind(), ImageErrorKind::Invalid);
    let bad = export_raw(&store, version.manifest, &dir.path(""), &Cancel::new(), &mut |_| {});
    assert!(bad.unwrap_err().to_string().contains("directory"));
    let bad = export_raw(&store, version.manifest, &dir.path("no/such"), &Cancel::new(), &mut |_| {});
    assert_eq!(bad.unwrap_err().kind(), ImageErrorKind::NotFound);
}

#[test]
fn an_export_overwrites_no_other_file() {
    let dir = Dir::new();
    let mut disk = vec![0; 64 << 10];
    noise(&mut disk, 1);
    let (_store_dir, store) = store();
    let version = import_bytes(&store, "disk", &disk).version;
    let export = |name: &str| {
        let to = dir.path(name);
        export_raw(&store, version.manifest, &to, &Cancel::new(), &mut |_| {}).unwrap();
        assert!(fs::read(to).unwrap() == disk);
    };
    // A file of another program, and a link to one.
    fs::write(dir.path(".a.partial"), b"mine").unwrap();
    fs::write(dir.path("precious"), b"mine").unwrap();
    symlink(dir.path("precious"), dir.path(".b.partial")).unwrap();
    for name in ["a", "b", &"n".repeat(255)] {
        export(name);
    }
    for name in [".a.partial", "precious", ".b.partial"] {
        assert_eq!(fs::read(dir.path(name)).unwrap(), b"mine");
    }
    assert_eq!(partials(dir.0.path()).len(), 2);
}

#[test]
fn simultaneous_exports_to_one_name_leave_a_complete_file() {
    let dir = Dir::new();
    let mut disk = vec![0; 64 << 10];
    noise(&mut disk, 1);
    let (_store_dir, store) = store();
    let version = import_bytes(&store, "disk", &disk).version;
    let (out, ready) = (dir.path("out"), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    let exported = export_raw(&store, version.manifest, &out, &Cancel::new(), &mut |_| {});
                    if let Err(e) = &exported {
                        assert_eq!(e.kind(), ImageErrorKind::Busy, "{e}");
                    }
                    ready.fetch_add(u32::from(exported.is_ok()), Ordering::Relaxed);
                    // From now on the file is complete, whatever the other exports do.
                    assert!(fs::read(&out).unwrap() == disk);
                }
            });
        }
    });
    assert_eq!(ready.into_inner(), 1);
    assert_eq!(partials(dir.0.path()), [] as [&str; 0]);
}

#[test]
fn a_cancelled_import_does_not_wait_for_a_source_that_hangs() {
    let (store_dir, store) = store();
    let before = files(store_dir.path());
    let source = disk_of(vec![0; 4 << 20]);
    source.hold();
    let (ended, outcome) = mpsc::channel();
    let theirs = Arc::clone(&source);
    std::thread::spawn(move || {
        let options = ImportOptions::new("disk".parse().unwrap(), 0);
        let cancel = options.cancel.clone();
        ended.send(import(theirs, &store, &options, &mut |_| cancel.cancel())).unwrap();
    });
    let error = outcome.recv_timeout(Duration::from_secs(60)).expect("the import ends").unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Cancelled);
    assert_eq!(files(store_dir.path()), before);
    // Answers that come too late are ignored.
    source.release();
    wait_until("all is answered", || source.waiting() == 0);
}
