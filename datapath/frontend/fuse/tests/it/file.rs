//! The mounted file as programs see it: sizes, permissions, errors, durability; and how a mount begins and
//! ends.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use crate::fixture::Mounted;
use headwater_block::{ByteRange, IoErrorKind, blocking};
use headwater_fuse::{Limits, MountError, Options, Server};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits, output, succeed, wait_until};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

const SIZE: u64 = 8 << 20;

fn mounted() -> Mounted {
    Mounted::new(SIZE, ReferenceOptions::default())
}

fn errno<T>(result: std::io::Result<T>) -> Option<Errno> {
    result.err().and_then(|error| error.raw_os_error()).map(Errno::from_raw_os_error)
}

#[test]
fn the_directory_has_one_file_and_nothing_can_be_added_or_removed() {
    let mounted = mounted();
    let dir = mounted.dir.path();
    let names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["disk"]);
    let file = mounted.file();
    let metadata = std::fs::metadata(&file).unwrap();
    assert_eq!((metadata.len(), metadata.mode(), metadata.nlink()), (SIZE, 0o100_600, 1));
    assert_eq!(errno(std::fs::File::create(dir.join("other"))), Some(Errno::PERM));
    assert_eq!(errno(std::fs::remove_file(&file)), Some(Errno::PERM));
    assert_eq!(errno(std::fs::rename(&file, dir.join("other"))), Some(Errno::PERM));
    assert_eq!(errno(std::fs::create_dir(dir.join("sub"))), Some(Errno::PERM));
    assert_eq!(errno(std::fs::metadata(dir.join("other"))), Some(Errno::NOENT));
    let space = rustix::fs::statvfs(dir).unwrap();
    assert_eq!((space.f_blocks * space.f_frsize, space.f_bavail), (SIZE, 0));
}

#[test]
fn permissions_and_owner_can_be_changed_while_it_is_mounted() {
    let mounted = mounted();
    let file = mounted.file();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(&file, Some(65_534), Some(12)).unwrap();
    let metadata = std::fs::metadata(&file).unwrap();
    assert_eq!((metadata.mode() & 0o7777, metadata.uid(), metadata.gid()), (0o640, 65_534, 12));
}

#[test]
fn others_come_in_only_where_they_are_allowed() {
    let as_nobody = |file: &Path| {
        let id = ["--reuid=65534", "--regid=65534", "--clear-groups", "cat"];
        output("util-linux", Command::new("setpriv").args(id).arg(file)).status.success()
    };
    for allow_other in [false, true] {
        let options = Options { allow_other, ..Options::default() };
        let mounted = Mounted::with(ReferenceDisk::new(SIZE), options);
        std::fs::set_permissions(
            mounted.dir.path().parent().unwrap(),
            std::fs::Permissions::from_mode(0o1777),
        )
        .unwrap();
        assert!(!as_nobody(&mounted.file()), "mode 0600");
        std::fs::set_permissions(mounted.file(), std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(as_nobody(&mounted.file()), allow_other);
    }
}

#[test]
fn the_size_cannot_be_changed_and_there_is_no_room_behind_the_end() {
    let mounted = mounted();
    let file = mounted.open();
    for size in [0, 4096, SIZE + 1] {
        assert_eq!(errno(file.set_len(size)), Some(Errno::PERM), "{size}");
    }
    file.set_len(SIZE).unwrap();
    assert_eq!(errno(std::fs::File::create(mounted.file())), Some(Errno::PERM), "O_TRUNC");
    assert_eq!(file.metadata().unwrap().len(), SIZE);
    // The part inside the file is written, the rest is refused.
    assert_eq!(file.write_at(&[7; 8192], SIZE - 4096).unwrap(), 4096);
    assert_eq!(errno(file.write_at(&[7; 1], SIZE)), Some(Errno::NOSPC));
    let mut append = OpenOptions::new().append(true).open(mounted.file()).unwrap();
    assert_eq!(errno(append.write(b"more")), Some(Errno::NOSPC));
    assert_eq!(mounted.disk.contents()[SIZE as usize - 4096..], [7; 4096]);
    assert_eq!(file.read_at(&mut [0; 10], SIZE).unwrap(), 0);
    assert_eq!(file.read_at(&mut [0; 10], SIZE - 3).unwrap(), 3);
}

#[test]
fn holes_are_punched_zeroed_and_found() {
    let mounted = mounted();
    let file = mounted.open();
    file.write_all_at(&[1; 64 << 10], 0).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 100, 20_000).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 32_768, 4096).unwrap();
    let contents = mounted.disk.contents();
    assert_eq!((contents[99], contents[20_100], contents[32_767], contents[36_864]), (1, 1, 1, 1));
    assert!(contents[100..20_100].iter().chain(&contents[32_768..36_864]).all(|byte| *byte == 0));
    let counts = mounted.disk.counts();
    assert_eq!((counts.discards, counts.zeroes), (0, 2), "a hole is zeroes, whatever room there is");
    let find = |place| rustix::fs::seek(&file, place);
    assert_eq!(find(rustix::fs::SeekFrom::Hole(0)), Ok(512));
    assert_eq!(find(rustix::fs::SeekFrom::Data(512)), Ok(19_968));
    assert_eq!(find(rustix::fs::SeekFrom::Data(19_969)), Ok(19_969));
    assert_eq!(find(rustix::fs::SeekFrom::Data(64 << 10)), Err(Errno::NXIO));
    assert_eq!(find(rustix::fs::SeekFrom::Hole(SIZE - 1)), Ok(SIZE - 1));
    // Beyond the end nothing is punched; space cannot be reserved, collapsed or appended.
    rustix::fs::fallocate(&file, punch, SIZE - 4096, 1 << 20).unwrap();
    let refused = |mode, offset, len| rustix::fs::fallocate(&file, mode, offset, len).err();
    assert_eq!(refused(FallocateFlags::empty(), 0, 4096), Some(Errno::OPNOTSUPP));
    assert_eq!(refused(FallocateFlags::COLLAPSE_RANGE, 0, 4096), Some(Errno::OPNOTSUPP));
    assert_eq!(refused(FallocateFlags::ZERO_RANGE, SIZE, 4096), Some(Errno::NOSPC));
    // After the cached number of used bytes has expired, 64 KiB with a hole take less.
    std::thread::sleep(Duration::from_millis(2100));
    let blocks = file.metadata().unwrap().blocks();
    assert!((1..128).contains(&blocks), "{blocks}");
}

#[test]
fn used_space_is_updated_while_programs_keep_asking() {
    let mounted = mounted();
    let file = mounted.open();
    let blocks = || file.metadata().unwrap().blocks();
    let before = blocks();
    // The writes go on for longer than the number is cached, with pauses shorter than that.
    wait_until("a file that is written to takes more space", || {
        file.write_all_at(&[1; 64 << 10], 0).unwrap();
        blocks() >= before + 128
    });
}

#[test]
fn fsync_is_a_flush_and_synchronous_writes_are_durable_when_answered() {
    let mounted = mounted();
    let file = mounted.open();
    file.write_all_at(&[1; 4096], 0).unwrap();
    assert_eq!((mounted.disk.counts().flushes, mounted.disk.counts().fua), (0, 0));
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    assert_eq!(mounted.disk.counts().flushes, 2);
    for (flags, name) in [(libc::O_DSYNC | libc::O_DIRECT, "O_DSYNC"), (libc::O_SYNC, "O_SYNC")] {
        let durable = |counts: headwater_testkit::Counts| counts.fua + counts.flushes;
        let before = durable(mounted.disk.counts());
        let file = OpenOptions::new().write(true).custom_flags(flags).open(mounted.file()).unwrap();
        file.write_all_at(&[2; 4096], 4096).unwrap();
        assert!(durable(mounted.disk.counts()) > before, "{name}");
    }
}

#[test]
fn errors_of_the_device_reach_the_program_that_asked() {
    for waits in [Waits::Never, Waits::Always] {
        let mounted = Mounted::new(SIZE, ReferenceOptions { waits, ..Default::default() });
        let file = mounted.open();
        for (kind, expected) in [
            (IoErrorKind::NoSpace, Errno::NOSPC),
            (IoErrorKind::Device, Errno::IO),
            (IoErrorKind::Corrupt, Errno::IO),
            (IoErrorKind::Closed, Errno::SHUTDOWN),
        ] {
            mounted.disk.fail(ByteRange::new(4096, 4096).unwrap(), kind);
            assert_eq!(errno(file.write_at(&[1; 4096], 4096)), Some(expected));
            assert_eq!(errno(file.write_at(&[1; 10], 5000)), Some(expected), "a part of a block");
            assert_eq!(errno(file.read_at(&mut [0; 4096], 4096)), Some(expected));
            file.write_all_at(&[1; 4096], 0).unwrap();
            mounted.disk.heal();
            file.write_all_at(&[1; 4096], 4096).unwrap();
        }
    }
}

#[test]
fn a_mapping_sees_the_disk_and_writes_to_it() {
    let mounted = mounted();
    blocking::write(&*mounted.disk, 8192, &[5; 4096]).unwrap();
    let python = "import mmap,sys\n\
        f=open(sys.argv[1],'r+b'); m=mmap.mmap(f.fileno(),1<<20)\n\
        assert m[8192:8196]==b'\\x05'*4, m[8192:8196]\n\
        m[0:4]=b'abcd'; m.flush()\n";
    succeed("python3-minimal", Command::new("python3").args(["-c", python]).arg(mounted.file()));
    assert_eq!(&mounted.disk.contents()[..4], b"abcd");
}

#[test]
fn a_directory_that_is_in_use_missing_or_not_empty_is_refused() {
    let mount = |dir: &Path| {
        let disk = Arc::new(ReferenceDisk::new(SIZE));
        Server::mount(dir, disk, Options::default()).err()
    };
    let mounted = mounted();
    let error = mount(mounted.dir.path()).unwrap();
    assert!(matches!(error, MountError::InUse { .. }), "{error}");
    // The first mount still works.
    mounted.open().read_exact_at(&mut [0; 512], 0).unwrap();
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(mount(&dir.path().join("none")), Some(MountError::NoDirectory { .. })));
    std::fs::write(dir.path().join("file"), "x").unwrap();
    assert!(matches!(mount(&dir.path().join("file")), Some(MountError::NotADirectory { .. })));
    assert!(matches!(mount(dir.path()), Some(MountError::NotEmpty { .. })));
    for name in ["", "..", "a/b"] {
        let options = Options { name: name.into(), ..Options::default() };
        let error = Server::mount(dir.path(), Arc::new(ReferenceDisk::new(SIZE)), options).err();
        assert!(matches!(error, Some(MountError::Name { .. })), "{name}");
    }
}

#[test]
fn stopping_a_mount_in_use_ends_its_programs_with_errors_and_frees_the_directory() {
    let mounted = mounted();
    let mut file = mounted.open();
    mounted.server.stop();
    let error = file.read(&mut [0; 512]).unwrap_err();
    assert_ne!(error.kind(), ErrorKind::WouldBlock);
    assert!(std::fs::read_dir(mounted.dir.path()).unwrap().next().is_none());
    // The directory can be used again at once, while the old file is still open.
    let disk = Arc::new(ReferenceDisk::new(SIZE));
    let again = Server::mount(mounted.dir.path(), disk, Options::default()).unwrap();
    assert_eq!(std::fs::metadata(again.path()).unwrap().len(), SIZE);
}

#[test]
fn requests_that_the_device_keeps_do_not_hold_up_the_end() {
    let mounted = Mounted::new(SIZE, ReferenceOptions { waits: Waits::Always, ..Default::default() });
    mounted.disk.hold();
    let file = mounted.open();
    let reader = std::thread::spawn(move || file.read_at(&mut [0; 4096], 0));
    wait_until("the read reaches the disk", || mounted.disk.waiting() != 0);
    mounted.server.stop();
    assert!(reader.join().unwrap().is_err());
    mounted.disk.release();
}

#[test]
fn parts_of_blocks_that_wait_do_not_hold_up_the_end() {
    let limits = Limits { bytes_in_flight: 4096, stop_timeout_ms: 500, ..Limits::default() };
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let mounted =
        Mounted::with(ReferenceDisk::with_options(SIZE, options), Options { limits, ..Options::default() });
    mounted.disk.hold();
    let file = Arc::new(mounted.open());
    // One change runs on the disk; others wait for it, and the last ones for the limit, on the threads that
    // receive requests.
    let writers: Vec<_> = (0..12)
        .map(|number| {
            let file = Arc::clone(&file);
            std::thread::spawn(move || file.write_at(&[1; 1000], number * 8192 + 100))
        })
        .collect();
    wait_until("one reaches the disk", || mounted.disk.waiting() != 0);
    mounted.server.stop();
    for writer in writers {
        assert!(writer.join().unwrap().is_err());
    }
    mounted.disk.release();
    // The running change completes, because it was given to the disk.
    wait_until("the one is written", || mounted.disk.counts().writes == 1);
}

#[test]
fn programs_that_are_killed_in_the_middle_disturb_no_others() {
    let mounted = Mounted::new(SIZE, ReferenceOptions { waits: Waits::Always, ..Default::default() });
    blocking::write(&*mounted.disk, 0, &[7; 64 << 10]).unwrap();
    mounted.disk.hold();
    let path = mounted.file().display().to_string();
    let dd = |arguments: [&str; 3]| {
        Command::new("dd")
            .args(arguments)
            .args(["bs=16k", "count=1", "conv=notrunc", "status=none"])
            .spawn()
            .unwrap()
    };
    let (input, output) = (format!("if={path}"), format!("of={path}"));
    let mut reader = dd([&input, "of=/dev/null", "skip=1"]);
    let mut writer = dd(["if=/dev/zero", &output, "seek=2"]);
    wait_until("both requests reach the disk", || mounted.disk.waiting() >= 2);
    reader.kill().unwrap();
    writer.kill().unwrap();
    mounted.disk.release();
    assert!(!reader.wait().unwrap().success() && !writer.wait().unwrap().success());
    let file = mounted.open();
    file.write_all_at(&[9; 4096], 4096).unwrap();
    let mut bytes = vec![0; 64 << 10];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[..4096].iter().chain(&bytes[8192..32 << 10]).all(|byte| *byte == 7));
    assert!(bytes[4096..8192].iter().all(|byte| *byte == 9));
    // The write in flight had been received completely when its program was killed: it is executed completely
    // or not at all.
    assert!(bytes[32 << 10..48 << 10].iter().all(|byte| *byte == bytes[32 << 10]));
}

#[test]
fn unmounting_from_outside_is_reported_once() {
    let (tx, rx) = mpsc::channel();
    let on_unmounted: Option<Box<dyn FnOnce() + Send>> = Some(Box::new(move || tx.send(()).unwrap()));
    let mounted = Mounted::with(ReferenceDisk::new(SIZE), Options { on_unmounted, ..Options::default() });
    succeed("mount", Command::new("umount").arg(mounted.dir.path()));
    rx.recv_timeout(Duration::from_secs(60)).expect("it is told");
    mounted.server.stop();
}
