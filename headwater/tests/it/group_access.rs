//! `serve --group-access`: members of the daemon's group use it, and nobody else.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::support::{Daemon, Ran, short_dir};

const DAEMON: u32 = 64_001;
const MEMBER: u32 = 64_002;

/// The program where every user can go.
fn program() -> (tempfile::TempDir, PathBuf) {
    let dir = short_dir();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("headwater");
    std::fs::copy(env!("CARGO_BIN_EXE_headwater"), &program).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    (dir, program)
}

#[test]
fn members_of_the_group_use_the_daemon_and_others_do_not() {
    let daemon = Daemon::start_as_user_with(DAEMON, &["--group-access"]);
    let (_dir, program) = program();
    let as_user = |user: u32, group: u32, args: &[&str], input: Stdio| -> Ran {
        let mut command = Command::new(&program);
        command.uid(user).gid(group).current_dir("/").stdin(input).env("HEADWATER_DATA_DIR", daemon.path());
        command.args(args).output().expect("it runs").into()
    };
    as_user(MEMBER, DAEMON, &["status"], Stdio::null()).ok();
    as_user(MEMBER, MEMBER, &["status"], Stdio::null()).fails(7, &["members of its group"]);

    // The daemon cannot open files of another process, nor those of another user.
    let own = program.with_file_name("disk.raw");
    std::fs::write(&own, vec![7; 1 << 20]).unwrap();
    std::os::unix::fs::chown(&own, Some(MEMBER), Some(MEMBER)).unwrap();
    std::fs::set_permissions(&own, Permissions::from_mode(0o600)).unwrap();
    let path = own.to_str().unwrap();
    let refused = as_user(MEMBER, DAEMON, &["image", "import", path], Stdio::null());
    refused.fails(1, &["Permission denied", "image import - --name IMAGE <"]);
    let input = std::fs::File::open(&own).unwrap();
    let imported = as_user(MEMBER, DAEMON, &["image", "import", "-", "--name", "disk"], input.into());
    assert!(imported.ok().contains("disk@1, 1.0 MiB"));
    let input = std::fs::File::open(&own).unwrap();
    let by_root = as_user(0, 0, &["image", "import", "-", "--name", "again"], input.into());
    assert!(by_root.ok().contains("again@1, 1.0 MiB"));
    assert_eq!(std::fs::read_dir(daemon.path().join("exchange")).unwrap().count(), 0);

    let mode = |name: &str| daemon.path().join(name).metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode("."), mode("api.sock"), mode("exchange")), (0o710, 0o660, 0o770));
    for private in ["headwater.db", "store", "cache", "run", "daemon.id"] {
        assert_eq!(mode(private) & 0o077, 0, "{private}");
    }
}
