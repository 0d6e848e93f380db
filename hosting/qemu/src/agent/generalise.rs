//! Removes the identity of one machine from its guest, before its disk becomes a version that many machines
//! boot.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Agent, Exec, MAX_ANSWER_BYTES, shown};
use crate::error::{Error, Result};

/// The script that runs in the guest.
const SCRIPT: &str = include_str!("generalise.sh");

/// How long the script may take: it overwrites files and discards freed blocks.
const TIMEOUT: Duration = Duration::from_secs(900);

/// The most removed items that are reported.
const REMOVED_MAX: usize = 1000;

/// The answer of Windows to `guest-get-osinfo`.
pub(super) const WINDOWS: &str = "mswindows";

/// The result of generalising a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Generalised {
    /// The items that the guest removed.
    Removed(Vec<String>),
    /// The guest is Windows: use Microsoft's sysprep. Nothing was removed.
    Windows,
}

impl Agent {
    /// Removes the identity of the machine with this host name, and the files in `also` (paths that may have
    /// wildcards). An error if the agent does not answer within `timeout`, or if a step failed in the guest; all other
    /// items are removed then.
    pub async fn generalise(
        &self,
        host_name: &str,
        also: &[String],
        timeout: Duration,
    ) -> Result<Generalised> {
        self.ping(timeout).await?;
        let asked = self.call_within::<Value>("guest-get-osinfo", json!({}), MAX_ANSWER_BYTES, self.timeout);
        match asked.await {
            Ok(system) if system.get("id").and_then(Value::as_str) == Some(WINDOWS) => {
                return Ok(Generalised::Windows);
            }
            // An agent without this command is old, and no Windows in use has such an agent.
            Ok(_) | Err(Error::Agent { .. }) => {}
            Err(error) => return Err(error),
        }
        let mut command = ["sh", "-s", "--", host_name].map(str::to_owned).to_vec();
        command.extend_from_slice(also);
        let exec = Exec { command, input: SCRIPT.as_bytes().to_vec(), timeout: TIMEOUT };
        let output = self.exec(&exec).await?;
        if output.exit_code != 0 {
            let said = String::from_utf8_lossy(&output.stderr);
            let last: Vec<&str> = said.lines().rev().take(3).collect();
            let last: Vec<&str> = last.into_iter().rev().collect();
            let description = format!("exit code {}: {}", output.exit_code, shown(&last.join("; ")));
            return Err(Error::Agent { command: "generalise".to_owned(), description });
        }
        let removed = String::from_utf8_lossy(&output.stdout);
        Ok(Generalised::Removed(removed.lines().take(REMOVED_MAX).map(shown).collect()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::super::tests::{accept, answer, answer_to_sync};
    use super::*;
    use tokio::io::AsyncWriteExt;

    /// Runs the script on a tree, in a mount namespace and under chroot: as a guest would.
    fn run(root: &Path, arguments: &[&str]) -> (i32, String, String) {
        let mut child = Command::new("chroot")
            .arg(root)
            .args(["/bin/busybox", "sh", "-s", "--"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("chroot runs");
        child.stdin.take().unwrap().write_all(SCRIPT.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }

    fn write(root: &Path, path: &str, contents: &str) {
        let path = root.join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, contents).unwrap();
    }

    /// A system with only busybox, as small as a guest can be.
    fn system() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::create_dir_all(dir.path().join("dev")).unwrap();
        std::fs::write(dir.path().join("dev/null"), "").unwrap();
        std::fs::copy("/bin/busybox", bin.join("busybox")).expect("busybox (Debian: busybox-static)");
        let mut install = Command::new("chroot");
        install.arg(dir.path()).args(["/bin/busybox", "--install", "-s", "/bin"]);
        assert!(install.status().unwrap().success());
        dir
    }

    /// Windows cannot run in this test; its agent answers like this.
    #[tokio::test]
    async fn windows_is_recognised_and_runs_no_script() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let playing = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            let system = r#"{"return": {"id": "mswindows", "name": "Microsoft Windows"}}"#;
            answer(&mut stream, &[r#"{"return": {}}"#, system]).await;
        });
        let agent = Agent::new(&socket);
        let done = agent.generalise("lab", &[], Duration::from_secs(60)).await.unwrap();
        assert_eq!(done, Generalised::Windows);
        playing.await.unwrap();
    }

    #[test]
    fn the_script_removes_identity_and_leaves_the_rest() {
        let dir = system();
        let root = dir.path();
        let gone = [
            "/etc/ssh/ssh_host_ed25519_key",
            "/etc/ssh/ssh_host_ed25519_key.pub",
            "/var/lib/dbus/machine-id",
            "/var/lib/dhcp/dhclient.eth0.leases",
            "/var/lib/systemd/random-seed",
            "/root/.bash_history",
            "/home/anna/.zsh_history",
            "/var/log/syslog.1",
            "/var/log/journal/0123/system.journal",
            "/srv/with space/token",
            "/srv/licence.key",
        ];
        let kept = ["/etc/ssh/sshd_config", "/root/.bashrc", "/srv/other", "/etc/passwd"];
        for path in gone.iter().chain(&kept) {
            write(root, path, "x\n");
        }
        write(root, "/etc/machine-id", "0123456789abcdef0123456789abcdef\n");
        write(root, "/etc/hostname", "lab\n");
        write(root, "/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 lab.example.com lab\n10.0.0.9 lab2\n");
        write(root, "/var/log/wtmp", "logins");
        write(root, "/var/log/apt/history.log", "installed");
        let (code, said, wrong) =
            run(root, &["lab.example.com", "/srv/with space/tok*", "/srv/*.key", "/none/*"]);
        assert_eq!((code, wrong.as_str()), (0, ""), "{said}");
        let at = |path: &str| root.join(path.trim_start_matches('/'));
        for path in gone {
            assert!(!at(path).exists(), "{path} is there");
        }
        for path in kept {
            assert_eq!(std::fs::read_to_string(at(path)).unwrap(), "x\n", "{path}");
        }
        let read = |path: &str| std::fs::read_to_string(at(path)).unwrap();
        assert_eq!((read("/etc/machine-id").as_str(), read("/etc/hostname").as_str()), ("", "localhost\n"));
        assert_eq!(read("/etc/hosts"), "127.0.0.1 localhost\n10.0.0.9 lab2\n");
        assert_eq!(read("/var/log/wtmp") + &read("/var/log/apt/history.log"), "");
        for path in ["/etc/ssh/ssh_host_ed25519_key", "/srv/with space/token", "/etc/machine-id (emptied)"] {
            assert!(said.lines().any(|line| line == path), "{path}: {said}");
        }
        // A second run has nothing to do.
        assert_eq!(run(root, &["lab"]), (0, String::new(), String::new()));
    }

    #[test]
    fn image_hooks_are_run_and_failures_reported() {
        let dir = system();
        let root = dir.path();
        write(root, "/etc/headwater/generalise.d/10-agent", "#!/bin/sh\nrm /srv/registration\n");
        write(root, "/etc/headwater/generalise.d/README", "not run\n");
        write(root, "/srv/registration", "x");
        let mode = |name: &str, mode| {
            let path = root.join("etc/headwater/generalise.d").join(name);
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        };
        mode("10-agent", 0o755);
        mode("README", 0o644);
        let (code, said, _) = run(root, &["lab"]);
        assert_eq!((code, said.as_str()), (0, "/etc/headwater/generalise.d/10-agent (run)\n"));
        assert!(!root.join("srv/registration").exists());
        let (code, _, wrong) = run(root, &["lab"]);
        assert!(code == 1 && wrong.contains("10-agent failed"), "{code}: {wrong}");
    }
}
