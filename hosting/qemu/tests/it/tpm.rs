//! Tests the TPM of a machine: the firmware finds it, and it ends with its machine in every case.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use headwater_qemu::{Error, Guest, Lifetime, sweep_orphans};
use headwater_testkit::wait_until;

use crate::machine::{LOGIN, PATIENCE, Setup, is_alive, kill_9, names, when_listening};

/// Prints "login:" only if the firmware reports a TPM.
fn login_with_tpm() -> Vec<u8> {
    #[rustfmt::skip]
    let ask = [
        0xb8, 0x00, 0xbb, // mov ax, 0xbb00: TCG_StatusCheck
        0xcd, 0x1a,       // int 0x1a
        0x66, 0x85, 0xc0, // test eax, eax
        0x75, 0xfe,       // jnz here
    ];
    let mut login = LOGIN.to_vec();
    // The text follows these instructions.
    login[8] += u8::try_from(ask.len()).unwrap();
    [&ask[..], &login].concat()
}

fn tpm_of(run_dir: &Path) -> u32 {
    let line = std::fs::read_to_string(run_dir.join("tpm.pid")).unwrap();
    line.split(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_has_a_tpm_that_ends_with_its_machine() {
    let setup = Setup::new(&login_with_tpm());
    let mut spec = setup.spec("one");
    spec.tpm = Some(spec.files().tpm_state());
    // An invalid state that an earlier run left.
    std::fs::create_dir_all(spec.files().tpm_state()).unwrap();
    std::fs::write(spec.files().tpm_state().join("tpm2-00.permall"), "not a state").unwrap();
    let guest = Guest::start(&spec).await.unwrap();
    guest.wait_booted(PATIENCE).await.unwrap();
    let tpms = guest.monitor().execute("query-tpm", serde_json::json!({})).await.unwrap();
    assert_eq!(tpms[0]["model"], "tpm-crb", "{tpms}");
    let tpm = tpm_of(&spec.run_dir);
    assert!(is_alive(tpm));
    for (path, mode) in [("tpm", 0o700), ("tpm/tpm2-00.permall", 0o600), ("tpm.sock", 0o600)] {
        let found = std::fs::metadata(spec.run_dir.join(path)).unwrap().permissions().mode();
        assert_eq!(found & 0o777, mode, "{path}");
    }
    guest.kill().await.unwrap();
    assert!(!is_alive(tpm));
    assert_eq!(names(&spec.run_dir), ["console.log", "qemu.log", "tpm.log"]);

    let guest = Guest::start(&spec).await.unwrap();
    let tpm = tpm_of(&spec.run_dir);
    kill_9(guest.pid());
    guest.wait_exit().await.unwrap();
    assert!(!is_alive(tpm));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_persistent_tpm_is_used_again() {
    let setup = Setup::new(LOGIN);
    let mut spec = setup.spec("kept");
    let state = setup.dir.path().join("kept-tpm");
    spec.tpm = Some(state.clone());
    Guest::start(&spec).await.unwrap().kill().await.unwrap();
    assert!(names(&state).contains(&"tpm2-00.permall".to_owned()));
    Guest::start(&spec).await.unwrap().kill().await.unwrap();
    // The next start must use this file, and a failed start must leave nothing running.
    std::fs::write(state.join("tpm2-00.permall"), "not a state").unwrap();
    let error = Guest::start(&spec).await.unwrap_err();
    assert!(matches!(&error, Error::StartFailed { .. }), "{error}");
    assert!(error.to_string().contains("; swtpm: "), "{error}");
    assert_eq!(names(&spec.run_dir), ["console.log", "qemu.log", "tpm.log"]);
    assert!(state.exists());
}

/// Ends a machine without an owner if its test fails.
struct Unowned(PathBuf);

impl Drop for Unowned {
    fn drop(&mut self) {
        for file in ["qemu.pid", "tpm.pid"] {
            if let Ok(line) = std::fs::read_to_string(self.0.join(file)) {
                let pid = line.split(' ').next().unwrap_or_default();
                let _ = Command::new("kill").args(["-9", pid]).status();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tpm_of_an_adopted_machine_ends_with_it() {
    let setup = Setup::new(LOGIN);
    let mut spec = setup.spec("adopted");
    spec.tpm = Some(spec.files().tpm_state());
    let _unowned = Unowned(spec.run_dir.clone());
    let own = spec.clone();
    // A daemon that ends.
    let daemon = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(Guest::start_with(&own, Lifetime::Own)).map(drop)
    });
    tokio::task::spawn_blocking(|| daemon.join().unwrap()).await.unwrap().unwrap();
    let tpm = tpm_of(&spec.run_dir);
    let adopted = Guest::adopt("adopted", &spec.run_dir, 1, None).await.unwrap().unwrap();
    assert!(is_alive(tpm));
    adopted.kill().await.unwrap();
    assert!(!is_alive(tpm) && !spec.files().tpm_state().exists());
}

/// Starts a TPM like a daemon that is killed before QEMU runs.
fn abandon(run_dir: &Path) -> std::process::Child {
    std::fs::create_dir_all(run_dir.join("tpm")).unwrap();
    let socket = run_dir.join("tpm.sock");
    let child = Command::new("swtpm")
        .args(["socket", "--tpm2", "--terminate", "--tpmstate"])
        .arg(format!("dir={}", run_dir.join("tpm").display()))
        .arg("--ctrl")
        .arg(format!("type=unixio,path={},mode=0600", socket.display()))
        .stdin(Stdio::null())
        .spawn()
        .expect("cannot run swtpm; apt-get install swtpm");
    when_listening(child, &socket)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tpm_without_a_machine_is_ended_and_no_other_tpm() {
    let (setup, other) = (Setup::new(LOGIN), Setup::new(LOGIN));
    let run_dir: PathBuf = setup.run_root().join("left");
    let (mut left, mut strange) = (abandon(&run_dir), abandon(&other.run_root().join("left")));
    assert!(sweep_orphans(&setup.run_root(), &[]).await.unwrap().is_empty());
    left.wait().unwrap();
    assert!(names(&run_dir).is_empty(), "{:?}", names(&run_dir));
    assert!(strange.try_wait().unwrap().is_none(), "another daemon's TPM was ended");
    strange.kill().unwrap();
    strange.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_continues_if_its_tpm_is_killed() {
    let setup = Setup::new(LOGIN);
    let mut spec = setup.spec("alone");
    spec.tpm = Some(spec.files().tpm_state());
    let guest = Guest::start(&spec).await.unwrap();
    let tpm = tpm_of(&spec.run_dir);
    kill_9(tpm);
    wait_until("the TPM has ended", || !is_alive(tpm));
    assert!(guest.status().await.unwrap().running);
    guest.kill().await.unwrap();
    assert_eq!(names(&spec.run_dir), ["console.log", "qemu.log", "tpm.log"]);
}
