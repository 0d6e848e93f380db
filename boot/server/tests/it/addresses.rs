//! Tests full DHCP with real clients: busybox's udhcpc in a network namespace.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use headwater_boot_server::{AddressOptions, BootServer, Mac, Options, Ports, Subnet, Subnets, Targets};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::namespace::{FAR, Far, NEAR, enter, run};
use crate::{One, loaders_of};

const FIXED: Mac = Mac([2, 0, 0, 0, 0, 0x99]);

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Serves until the sender is dropped; then the task ends.
fn serve(dir: &Path) -> (watch::Sender<bool>, JoinHandle<()>) {
    let at = |last| Ipv4Addr::new(10, 77, 0, last);
    let subnet = Subnet {
        network: at(0),
        prefix: 24,
        range: Some((at(100), at(101))),
        router: Some(at(1)),
        dns: vec![at(3)],
        domain: Some("lab.example".into()),
        lease_s: 600,
        fixed: HashMap::from([(FIXED, at(50))]),
    };
    let addresses =
        AddressOptions { subnets: Subnets::new(vec![subnet]).unwrap(), leases: dir.join("leases"), now_s };
    let options = Options {
        interface: NEAR.into(),
        ports: Ports::default(),
        loaders: loaders_of(dir),
        addresses: Some(addresses),
    };
    let server = BootServer::bind(&options).unwrap();
    let (stop, stopped) = watch::channel(false);
    let targets: Arc<dyn Targets> = Arc::new(One::new(dir));
    (stop, tokio::spawn(server.run(targets, stopped)))
}

struct Clients {
    far: Far,
    script: PathBuf,
}

impl Clients {
    fn new(dir: &Path) -> Self {
        let script = dir.join("script");
        let text = "#!/bin/sh\n[ \"$1\" = bound ] && echo \"got $ip/$mask router $router dns $dns domain $domain lease $lease \
                    next $siaddr file $boot_file.\"\nexit 0\n";
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        Self { far: Far::connect(), script }
    }

    /// Runs a client with this hardware address, and returns its lease. `None`: the client gives up.
    async fn ask(&self, mac: Mac, arguments: &[&str]) -> Option<String> {
        let mac = mac.to_string();
        run(self.far.command("ip").args(["link", "set", FAR, "down"]));
        run(self.far.command("ip").args(["link", "set", FAR, "address", &mac, "up"]));
        let mut command = self.far.command("busybox");
        command.args(["udhcpc", "-i", FAR, "-f", "-n", "-q", "-t", "5", "-T", "2", "-s"]);
        command.arg(&self.script).args(arguments);
        let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let line = said.lines().find(|line| line.starts_with("got "));
        assert_eq!(line.is_some(), output.status.success(), "{said}");
        line.map(str::to_owned)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn udhcpc_gets_addresses_that_outlive_the_server() {
    if !enter("addresses::udhcpc_gets_addresses_that_outlive_the_server") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let clients = Clients::new(dir.path());
    let (stop, over) = serve(dir.path());
    let mac = |number| Mac([2, 0, 0, 0, 0, number]);
    let fixed = clients.ask(FIXED, &[]).await.unwrap();
    assert_eq!(
        fixed,
        "got 10.77.0.50/24 router 10.77.0.1 dns 10.77.0.3 domain lab.example lease 600 next  file ."
    );
    let first = clients.ask(mac(1), &[]).await.unwrap();
    assert!(first.starts_with("got 10.77.0.10"), "{first}");
    // Firmware of a registered machine gets its loader with the address.
    let boots = clients.ask(crate::MAC, &["-V", "PXEClient:Arch:00000:UNDI:002001"]).await.unwrap();
    assert!(boots.ends_with("next 10.77.0.2 file undionly.kpxe."), "{boots}");
    // Both addresses are leased.
    assert_eq!(clients.ask(mac(2), &[]).await, None);
    drop(stop);
    over.await.unwrap();
    let (_stop, _over) = serve(dir.path());
    assert_eq!(clients.ask(mac(1), &[]).await.unwrap(), first);
    assert_eq!(clients.ask(mac(2), &[]).await, None);
    // A client that releases its address makes it free.
    clients.ask(mac(1), &["-R"]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_in_use_is_not_offered() {
    if !enter("addresses::an_address_in_use_is_not_offered") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let clients = Clients::new(dir.path());
    clients.far.set_address("10.77.0.100/24");
    let (_stop, _over) = serve(dir.path());
    let got = clients.ask(Mac([2, 0, 0, 0, 0, 1]), &["-r", "10.77.0.100"]).await.unwrap();
    assert!(got.starts_with("got 10.77.0.101/"), "{got}");
    let leases = std::fs::read_to_string(dir.path().join("leases")).unwrap();
    assert!(
        leases.lines().any(|line| line.starts_with("10.77.0.100 ") && line.contains(" declined ")),
        "{leases}"
    );
}
