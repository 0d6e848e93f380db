//! Damage, crashes and full disks.

use crate::fixture::{self, disk_of, files, import_bytes, noise, partials, read_all, store};
use headwater_block::{ByteRange, IoErrorKind, blocking};
use headwater_image::{
    Basis, Cancel, ChunkCache, ImageErrorKind, ImportOptions, VersionReader, export_raw, import, verify,
};
use headwater_store::{Access, LocalDir, Store, Version};
use headwater_testkit::{test_name, wait_until};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Set for the child process that is killed or runs out of space: the directory of its store.
const CHILD_STORE: &str = "HEADWATER_TEST_CHILD_STORE";

fn disk() -> Vec<u8> {
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk[..1 << 20], 1);
    for (n, part) in disk[2 << 20..3 << 20].chunks_mut(64).enumerate() {
        part[..8].copy_from_slice(&(n as u64).to_le_bytes());
    }
    disk
}

fn object_path(dir: &Path, version: &Version) -> std::path::PathBuf {
    dir.join("objects").join(version.objects[0].to_string())
}

fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[test]
fn damaged_chunks_are_stored_again_by_the_next_import() {
    let (dir, store) = store();
    let disk = disk();
    let first = import_bytes(&store, "disk", &disk).version;
    let path = object_path(dir.path(), &first);
    let good = fs::read(&path).unwrap();
    let sound = |version: &Version| {
        let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
        let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(0)).unwrap();
        found.is_sound() && read_all(reader.as_ref()) == disk
    };
    let again = |name: &str| {
        let mut options = ImportOptions::new(name.parse().unwrap(), 1_700_000_000);
        options.unless_newest = true;
        import(disk_of(disk.clone()), &store, &options, &mut |_| {}).unwrap()
    };
    assert_eq!((again("disk").version.number, again("disk").damaged_chunks), (1, 0));

    flip(&path, 20_000);
    flip(&path, 400_000);
    let second = again("disk");
    assert_eq!((second.version.number, second.damaged_chunks), (2, 2));
    assert_eq!(second.data_bytes - second.shared_bytes, 2 << 16);
    assert!(sound(&second.version) && !sound(&first));
    // Chunks that were stored again are found: nothing is stored a third time, for this image or another one.
    let third = again("disk");
    assert_eq!((third.version.number, third.damaged_chunks), (2, 2));
    let other = again("copy");
    assert_eq!((other.version.manifest, other.shared_bytes), (second.version.manifest, other.data_bytes));

    // A version that is made from the undamaged version is undamaged, too.
    let mut changed = disk.clone();
    changed[3 << 20] ^= 1;
    let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    let parent = second.version.manifest;
    let changes = Arc::new(|range: ByteRange, _: usize| {
        let before = (3u64 << 20).saturating_sub(range.offset()).min(range.len());
        vec![(before, false), (range.len() - before, true)]
    });
    options.basis = Some(Basis { parent, changes });
    let sealed = import(disk_of(changed), &store, &options, &mut |_| {}).unwrap();
    let found = verify(&store, sealed.version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert!(found.is_sound(), "{found:?}");

    // An object that was cut short becomes whole when all of it is stored again.
    File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let (other_dir, fresh) = fixture::store();
    let here = import_bytes(&fresh, "disk", &disk).version;
    let path = object_path(other_dir.path(), &here);
    File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    assert_eq!(import_bytes(&fresh, "disk", &disk).version.manifest, here.manifest);
    assert!(fs::read(&path).unwrap() == good);
}

#[test]
fn a_flipped_byte_is_found_and_affects_only_its_chunk() {
    let (dir, store) = store();
    let disk = disk();
    let version = import_bytes(&store, "disk", &disk).version;
    let path = object_path(dir.path(), &version);
    let len = fs::metadata(&path).unwrap().len();
    for at in (0..len).step_by(9973).chain([0, 7, 8, 15, 16, len - 1]) {
        flip(&path, at);
        let mut seen = 0;
        let found = verify(&store, version.manifest, &Cancel::new(), &mut |p| seen = p.done_bytes).unwrap();
        assert_eq!(seen, disk.len() as u64);
        if at < 16 {
            assert_eq!((found.damaged_chunks, found.objects.len()), (0, 1), "byte {at}");
            flip(&path, at);
            continue;
        }
        assert_eq!((found.damaged_chunks, found.chunks, found.objects.len()), (1, 32, 0), "byte {at}");
        let damaged = &found.damaged[0];
        let stored = damaged.object_offset..damaged.object_offset + u64::from(damaged.stored_bytes);
        assert!(stored.contains(&at) && damaged.object == version.objects[0], "byte {at}: {damaged}");

        let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(1 << 20)).unwrap();
        let mut bytes = vec![0; damaged.image_bytes as usize];
        let error = blocking::read(reader.as_ref(), damaged.image_offset, &mut bytes).unwrap_err();
        assert_eq!(error.kind(), IoErrorKind::Corrupt);
        assert!(error.to_string().contains(&version.objects[0].to_string()), "{error}");
        let elsewhere = if damaged.image_offset == 0 { 65_536 } else { 0 };
        blocking::read(reader.as_ref(), elsewhere, &mut bytes).unwrap();
        assert!(bytes == disk[elsewhere as usize..elsewhere as usize + bytes.len()]);
        let out = dir.path().join("out");
        let error = export_raw(&store, version.manifest, &out, &Cancel::new(), &mut |_| {}).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Damaged);
        assert!(!out.exists() && partials(dir.path()).is_empty());

        flip(&path, at);
        // The reader reads again and gets the correct bytes.
        assert!(read_all(reader.as_ref()) == disk);
    }
    assert!(verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap().is_sound());
}

#[test]
fn verify_continues_and_names_every_damaged_chunk() {
    let (dir, store) = store();
    let version = import_bytes(&store, "disk", &disk()).version;
    let path = object_path(dir.path(), &version);
    // Random bytes are stored uncompressed, so chunk n starts at 16 + n * 65536.
    for chunk in [3, 9, 15] {
        flip(&path, 16 + chunk * 65_536 + 5);
    }
    let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
    let places: Vec<u64> = found.damaged.iter().map(|d| d.image_offset / 65_536).collect();
    assert_eq!((places.as_slice(), found.chunks), (&[3, 9, 15][..], 32));

    File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((found.damaged_chunks, found.objects.len()), (32, 1));
    fs::remove_file(&path).unwrap();
    let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((found.damaged_chunks, found.objects.len()), (32, 1));
    assert!(!found.is_sound());
    assert!(VersionReader::open(&store, version.manifest, ChunkCache::new(0)).is_err());
}

#[test]
fn a_truncated_object_is_an_error_and_never_zeroes() {
    let (dir, store) = store();
    let disk = disk();
    let version = import_bytes(&store, "disk", &disk).version;
    let path = object_path(dir.path(), &version);
    let whole = fs::read(&path).unwrap();
    for len in (0..whole.len()).step_by(97_003).chain([1, 15, 16, whole.len() - 1]) {
        fs::write(&path, &whole[..len]).unwrap();
        let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
        assert_eq!(found.objects.len(), 1, "{len}");
        assert!(found.damaged_chunks > 0, "{len}");
        let out = dir.path().join("out");
        let error = export_raw(&store, version.manifest, &out, &Cancel::new(), &mut |_| {}).unwrap_err();
        assert!(!out.exists(), "{len}");
        assert!(error.to_string().contains(&version.objects[0].to_string()), "{len}: {error}");
        // The remaining bytes are still correct, and a read of the missing ones is an error.
        let Ok(reader) = VersionReader::open(&store, version.manifest, ChunkCache::new(1 << 20)) else {
            continue;
        };
        let mut bytes = vec![0; 65_536];
        for at in (0..disk.len()).step_by(65_536) {
            if blocking::read(reader.as_ref(), at as u64, &mut bytes).is_ok() {
                assert!(bytes == disk[at..at + 65_536], "cut to {len}: other bytes at {at}");
            }
        }
    }
}

#[test]
fn a_flipped_byte_anywhere_in_the_manifest_is_found() {
    let (dir, store) = store();
    let version = import_bytes(&store, "disk", &disk()).version;
    let path = dir.path().join("manifests").join(version.manifest.to_string());
    for at in 0..fs::metadata(&path).unwrap().len() {
        flip(&path, at);
        let opened = VersionReader::open(&store, version.manifest, ChunkCache::new(0));
        assert_eq!(opened.map(drop).unwrap_err().kind(), ImageErrorKind::Damaged, "byte {at}");
        flip(&path, at);
    }
    VersionReader::open(&store, version.manifest, ChunkCache::new(0)).unwrap();
}

/// The directory of the store, in the child process.
fn child_store() -> Option<std::path::PathBuf> {
    std::env::var_os(CHILD_STORE).map(Into::into)
}

/// What a child does until it is stopped.
fn import_again_and_again(dir: &Path) {
    let store = LocalDir::open(dir, Access::WRITE).unwrap();
    for round in 0.. {
        let mut disk = vec![0; 6 << 20];
        noise(&mut disk, 100 + round);
        let options = ImportOptions::new("child".parse().unwrap(), round);
        match import(disk_of(disk), &store, &options, &mut |_| {}) {
            Ok(_) => println!("imported {round}"),
            Err(e) => {
                println!("{:?}: {e}", e.kind());
                return;
            }
        }
        store.remove(&"child".parse().unwrap(), None).unwrap();
    }
}

/// This program as a child process, which runs only the test with this name.
fn child(shell: &str, test: &str, dir: &Path) -> Command {
    let mut command = Command::new("sh");
    let program = std::env::current_exe().unwrap();
    let script = format!("{shell} exec \"$0\" --exact {test} --nocapture");
    command.arg("-c").arg(script).arg(program).env(CHILD_STORE, dir).stderr(Stdio::null());
    command
}

#[test]
fn an_import_killed_at_any_moment_leaves_nothing_behind() {
    if let Some(dir) = child_store() {
        return import_again_and_again(&dir);
    }
    let this = test_name(an_import_killed_at_any_moment_leaves_nothing_behind);
    let dir = tempfile::tempdir().unwrap();
    let kept = {
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        import_bytes(&store, "kept", &disk()).version
    };
    let before = files(dir.path());
    let mut interrupted = 0;
    for n in 0..25 {
        let mut child = child("", this, dir.path()).stdout(Stdio::null()).spawn().unwrap();
        wait_until("an import has begun", || files(dir.path()) != before);
        std::thread::sleep(Duration::from_millis(n * 7));
        child.kill().unwrap();
        child.wait().unwrap();
        interrupted += usize::from(files(dir.path()) != before);
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        // It may have been killed between an import and the removal after it: then the version is whole.
        if let Ok(version) = store.resolve(&"child".parse().unwrap()) {
            assert!(verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap().is_sound());
            store.remove(&"child".parse().unwrap(), None).unwrap();
        }
        assert_eq!(files(dir.path()), before);
        assert!(verify(&store, kept.manifest, &Cancel::new(), &mut |_| {}).unwrap().is_sound());
    }
    assert!(interrupted > 0, "no import was ever interrupted in the middle");
}

#[test]
fn an_import_without_enough_space_fails_and_leaves_nothing() {
    if let Some(dir) = child_store() {
        return import_again_and_again(&dir);
    }
    let this = test_name(an_import_without_enough_space_fails_and_leaves_nothing);
    let dir = tempfile::tempdir().unwrap();
    drop(LocalDir::open(dir.path(), Access::WRITE).unwrap());
    let before = files(dir.path());
    // A limit on the size of files simulates a full disk: it needs no mount and gives EFBIG.
    let output = child("trap '' XFSZ; ulimit -f 4096;", this, dir.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("NoSpace: cannot write"), "{said}");
    assert_eq!(files(dir.path()), before);
}

fn export(dir: &Path) {
    let store = LocalDir::open(dir, Access::Read).unwrap();
    let version = store.resolve(&"disk".parse().unwrap()).unwrap();
    match export_raw(&store, version.manifest, &dir.join("out"), &Cancel::new(), &mut |_| {}) {
        Ok(()) => println!("exported"),
        Err(e) => println!("{:?}: {e}", e.kind()),
    }
}

#[test]
fn an_export_without_enough_space_fails_and_leaves_nothing() {
    if let Some(dir) = child_store() {
        return export(&dir);
    }
    let this = test_name(an_export_without_enough_space_fails_and_leaves_nothing);
    let (dir, store) = store();
    import_bytes(&store, "disk", &disk());
    let export = |shell| {
        let output = child(shell, this, dir.path()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let said = export("trap '' XFSZ; ulimit -f 1024;");
    assert!(said.contains("NoSpace: cannot write") && said.contains("removed"), "{said}");
    assert!(!dir.path().join("out").exists() && partials(dir.path()).is_empty());
    assert!(export("").contains("exported"));
}
