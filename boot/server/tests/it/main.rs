//! Tests TFTP and HTTP of the boot server with curl on the loopback interface, and DHCP with real servers and clients
//! in network namespaces.

mod addresses;
mod namespace;
mod site;
mod wake;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use headwater_boot_server::{Artefact, Boot, BootServer, Known, Loaders, Options, Ports, Targets};
use headwater_dhcp::Mac;
use tokio::sync::watch;

const MAC: Mac = Mac([0x52, 0x54, 0, 1, 2, 3]);
const MANIFEST: &str = "00ff";

/// Targets with one registered machine.
struct One {
    dir: PathBuf,
    problem: Mutex<Option<String>>,
    refusals: Mutex<Vec<String>>,
}

impl One {
    fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), problem: Mutex::default(), refusals: Mutex::default() }
    }
}

#[async_trait]
impl Targets for One {
    async fn find(&self, mac: Mac) -> Result<Option<Known>, String> {
        Ok((mac == MAC).then(|| Known { name: "pc-1".into() }))
    }

    async fn boot(&self, mac: Mac) -> Result<Boot, String> {
        if let Some(problem) = self.problem.lock().unwrap().clone() {
            return Err(problem);
        }
        Ok(Boot {
            machine: "pc-1".into(),
            mac,
            version: "debian@3".into(),
            manifest: MANIFEST.into(),
            options: "quiet".into(),
            root_partition: 1,
        })
    }

    fn artefact(&self, manifest: &str, which: Artefact) -> Option<PathBuf> {
        let name = if which == Artefact::Kernel { "kernel" } else { "initrd" };
        (manifest == MANIFEST).then(|| self.dir.join(name))
    }

    async fn settings(&self, boot: &Boot) -> Result<Vec<u8>, String> {
        Ok(format!("settings of {}", boot.machine).into_bytes())
    }

    async fn refused(&self, _mac: Mac, why: &str) {
        self.refusals.lock().unwrap().push(why.to_owned());
    }

    fn token(&self) -> std::io::Result<[u8; 16]> {
        Ok([0xab; 16])
    }
}

struct Running {
    dir: tempfile::TempDir,
    targets: Arc<One>,
    url: String,
    tftp: String,
    _stop: watch::Sender<bool>,
}

/// `len` bytes with a period that is not a power of two.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

/// Loaders, a kernel and an initramfs in a directory.
fn loaders_of(dir: &Path) -> Loaders {
    for (name, len) in [("bios", 74_001), ("efi", 512 * 3), ("kernel", 3 << 20), ("initrd", 700_001)] {
        std::fs::write(dir.join(name), bytes(len)).unwrap();
    }
    Loaders::read(&dir.join("bios"), &dir.join("efi")).unwrap()
}

fn start() -> Running {
    let dir = tempfile::tempdir().unwrap();
    let loaders = loaders_of(dir.path());
    let ports = Ports { dhcp: 0, boot_server: 0, tftp: 0, http: 0 };
    let server =
        BootServer::bind(&Options { interface: "lo".into(), ports, loaders, addresses: None }).unwrap();
    let (url, tftp) = (server.url(), server.tftp_address().unwrap());
    let targets = Arc::new(One::new(dir.path()));
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(server.run(Arc::clone(&targets) as Arc<dyn Targets>, stopped));
    let tftp = format!("tftp://127.0.0.1:{}", tftp.port());
    Running { dir, targets, url, tftp, _stop: stop }
}

/// Runs curl. Returns its exit code and output.
async fn curl(arguments: &[&str]) -> (i32, Vec<u8>) {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--max-time", "60"]).args(arguments);
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap();
    let output = output.expect("curl is installed (Debian package curl)");
    (output.status.code().unwrap_or(-1), output.stdout)
}

async fn get(url: &str) -> (String, String) {
    let (code, out) = curl(&["--write-out", "\n%{http_code}", url]).await;
    assert_eq!(code, 0, "{url}");
    let out = String::from_utf8(out).unwrap();
    let (body, status) = out.rsplit_once('\n').unwrap();
    (status.to_owned(), body.to_owned())
}

fn file(dir: &Path, name: &str) -> Vec<u8> {
    std::fs::read(dir.join(name)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_reads_both_loaders_by_tftp_with_and_without_options() {
    let running = start();
    for (name, source) in [("undionly.kpxe", "bios"), ("/headwater.efi", "efi")] {
        let url = format!("{}/{name}", running.tftp);
        for options in [&["--tftp-blksize", "1468"][..], &["--tftp-no-options"], &[]] {
            let (code, got) = curl(&[options, &[url.as_str()]].concat()).await;
            assert_eq!(code, 0, "{name} {options:?}");
            assert!(got == file(running.dir.path(), source), "{name} {options:?}: {} bytes", got.len());
        }
    }
    // Exit code 68: no such file.
    let (code, _) = curl(&[&format!("{}/revocations.efi", running.tftp)]).await;
    assert_eq!(code, 68);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_leads_to_kernel_initramfs_and_settings_once() {
    let running = start();
    let (status, script) = get(&format!("{}/b/52-54-00-01-02-03/boot.ipxe", running.url)).await;
    assert_eq!(status, "200");
    let named = |what: &str| {
        let line = script.lines().find(|line| line.contains(what)).unwrap_or_else(|| panic!("{script}"));
        line.split(' ').find(|word| word.starts_with("http://")).unwrap().to_owned()
    };
    for (name, source) in [("--name kernel", "kernel"), ("--name initrd", "initrd")] {
        let (code, got) = curl(&[&named(name)]).await;
        assert_eq!(code, 0);
        assert!(got == file(running.dir.path(), source), "{source}: {} bytes", got.len());
    }
    let settings = named("--name settings");
    // A HEAD request does not use up the token.
    let (code, head) = curl(&["--head", &settings]).await;
    assert!(code == 0 && String::from_utf8_lossy(&head).contains("content-length: 16"), "{head:?}");
    assert_eq!(get(&settings).await, ("200".into(), "settings of pc-1".into()));
    assert_eq!(get(&settings).await.0, "403");
    assert_eq!(get(&format!("{}/b/52-54-00-01-02-04/boot.ipxe", running.url)).await.0, "404");
    assert_eq!(get(&format!("{}/a/{MANIFEST}x/kernel", running.url)).await.0, "404");
}

#[tokio::test(flavor = "multi_thread")]
async fn grub_gets_the_same_files() {
    let running = start();
    let (status, script) = get(&format!("{}/b/52:54:00:01:02:03/grub.cfg", running.url)).await;
    assert_eq!(status, "200");
    let port = running.url.rsplit(':').next().unwrap();
    let kernel = format!("if linux (http,127.0.0.1:{port})/a/{MANIFEST}/kernel quiet; then\n");
    assert!(script.contains(&kernel), "{script}");
    *running.targets.problem.lock().unwrap() = Some("no image".into());
    let (_, script) = get(&format!("{}/b/52:54:00:01:02:03/grub.cfg", running.url)).await;
    assert_eq!(script, "echo \"headwater: pc-1: no image\"\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_cannot_boot_shows_the_reason() {
    let running = start();
    *running.targets.problem.lock().unwrap() = Some("no image 'debian' || reboot".into());
    let (status, script) = get(&format!("{}/b/52-54-00-01-02-03/boot.ipxe", running.url)).await;
    assert_eq!(status, "200");
    assert!(script.contains("echo headwater: pc-1: no image ?debian? ?? reboot\n"), "{script}");
    assert!(script.contains("chain --replace "), "{script}");
    assert_eq!(*running.targets.refusals.lock().unwrap(), ["no image 'debian' || reboot"]);
}
