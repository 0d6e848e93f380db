//! A file system that is really full, below the overflow file: somebody else fills it, and frees it again.

mod filling;
mod setup;

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use filling::{MIB, assert_holds, empty, eventually, fill};
use headwater_block::{IoErrorKind, blocking};
use headwater_volume::{CacheMode, PersistentOptions, VolumeOptions};
use rustix::fs::{FallocateFlags, fallocate};

/// The file system's directory, for the child.
const CHILD_DIR: &str = "HEADWATER_FULL_FILE_SYSTEM";
const SIZE_MIB: u64 = 160;
/// Of which somebody else takes this much.
const BALLAST_MIB: u64 = 96;
/// The volume's own limit; there is that much when it is opened, and it refuses to be opened otherwise.
const LIMIT_MIB: u64 = 150;

#[test]
fn a_file_system_that_others_fill_is_waited_for_and_used_again_when_it_has_room() {
    let dir = tempfile::tempdir().unwrap();
    // In a mount namespace of its own: nobody else sees the mount, and it goes with the process.
    let script = format!(
        "mount -t tmpfs -o size={SIZE_MIB}m tmpfs \"${CHILD_DIR}\" && exec \"$0\" --exact child_on_a_small_file_system --nocapture"
    );
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]);
    command.arg(std::env::current_exe().unwrap()).env(CHILD_DIR, dir.path());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.matches("kept all").count() == 2, "{said}{complained}");
}

/// Part of the test above, in a process of its own.
#[test]
fn child_on_a_small_file_system() {
    let Some(dir) = std::env::var_os(CHILD_DIR) else { return };
    for persistent in [false, true] {
        fill_and_free(Path::new(&dir), persistent);
        println!("kept all");
    }
}

fn fill_and_free(dir: &Path, persistent: bool) {
    let ballast = dir.join("ballast");
    let take = || {
        let file = File::create(&ballast).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, BALLAST_MIB * MIB).unwrap();
    };
    let kept = PersistentOptions { name: "kept".into(), key: [7; 16], base_id: [5; 32] };
    let options = VolumeOptions {
        persistent: persistent.then_some(kept),
        // Long beside what lies between two looks at the disk, on a busy machine too.
        pause_limit: Duration::from_secs(3),
        ..setup::options(&empty(256), CacheMode::RamDisk, 16, LIMIT_MIB, dir)
    };
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options, &host);
    for round in 0..2 {
        take();
        // The volume's own limit is far away: it is the file system that has no room.
        let (taken, why) = fill(&*device, 256);
        assert_eq!(why, Some(IoErrorKind::NoSpace), "round {round}, persistent: {persistent}");
        let most = SIZE_MIB - BALLAST_MIB + 16;
        assert!((30..=most).contains(&taken), "round {round}: {taken} MiB were taken");
        let cache = volume.counters().cache;
        assert!(cache.disk_errors > 0 && cache.refused_writes > 0 && cache.corrupt_blocks == 0, "{cache:?}");
        assert_holds(&*device, taken);

        // Nothing but that: no limit is changed, and nobody writes meanwhile.
        std::fs::remove_file(&ballast).unwrap();
        eventually("it is not full any more", || !volume.shortage().refusing);
        let refused = volume.counters().cache.refused_writes;
        let more = taken + BALLAST_MIB / 2;
        assert_eq!(fill(&*device, more), (more, None), "round {round}, persistent: {persistent}");
        assert_eq!(volume.counters().cache.refused_writes, refused);
        assert_holds(&*device, more);

        blocking::discard(&*device, 0, 256 * MIB).unwrap();
        eventually("what was discarded is given back to the file system", || {
            blocking::flush(&*device).unwrap();
            let free = rustix::fs::statvfs(dir).unwrap();
            free.f_bavail * free.f_frsize >= (BALLAST_MIB + 16) * MIB
        });
    }
    volume.close();
}
