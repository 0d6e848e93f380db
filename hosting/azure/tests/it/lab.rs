//! What tests of machines share: a clock, a journal, a fake Azure with a published image, and clients of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_azure::arm::resources::Scope;
use headwater_azure::machines::{DiskTier, Place, SizeChoice};
use headwater_azure::{
    Arm, AzureError, Clock, Credential, Endpoints, Entry, HttpClient, Journal, MachineId, MachineSpec,
    Machines, Pacer, PacerOptions, TokenSource,
};
use headwater_testkit_azure::arm::ArmServer;
use serde_json::json;
use tokio::sync::oneshot;

/// A journal in memory that outlives the clients.
#[derive(Debug, Default)]
pub struct Kept(Mutex<Vec<Entry>>);

impl Kept {
    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap().is_empty()
    }
}

#[async_trait]
impl Journal for Kept {
    async fn begin(&self, entry: &Entry) -> Result<(), AzureError> {
        let mut entries = self.0.lock().unwrap();
        entries.retain(|it| it.path != entry.path);
        entries.push(entry.clone());
        Ok(())
    }

    async fn accepted(&self, path: &str, operation: &str) -> Result<(), AzureError> {
        let mut entries = self.0.lock().unwrap();
        let entry =
            entries.iter_mut().find(|it| it.path == path).expect("an entry is begun before its request");
        entry.operation = Some(operation.to_owned());
        Ok(())
    }

    async fn end(&self, path: &str) -> Result<(), AzureError> {
        self.0.lock().unwrap().retain(|it| it.path != path);
        Ok(())
    }

    async fn open(&self) -> Result<Vec<Entry>, AzureError> {
        Ok(self.0.lock().unwrap().clone())
    }
}

/// A clock that advances to the end of the next wait when nothing else happens.
#[derive(Debug, Default)]
pub struct QuietClock(Mutex<Waits>);

#[derive(Debug, Default)]
struct Waits {
    now: Duration,
    waiting: BTreeMap<(Duration, u64), oneshot::Sender<()>>,
    begun: u64,
}

#[async_trait]
impl Clock for QuietClock {
    fn now(&self) -> Duration {
        self.0.lock().unwrap().now
    }

    async fn sleep(&self, duration: Duration) {
        let (sender, ended) = oneshot::channel();
        {
            let mut waits = self.0.lock().unwrap();
            waits.begun += 1;
            let key = (waits.now + duration, waits.begun);
            waits.waiting.insert(key, sender);
        }
        let _ = ended.await;
    }
}

impl QuietClock {
    /// Passes this time without a wait.
    pub fn pass(&self, duration: Duration) {
        self.0.lock().unwrap().now += duration;
    }

    fn begun(&self) -> u64 {
        self.0.lock().unwrap().begun
    }

    /// Ends the next wait, unless its owner is gone.
    fn advance(&self) {
        let mut waits = self.0.lock().unwrap();
        waits.waiting.retain(|_, sender| !sender.is_closed());
        let Some(next) = waits.waiting.keys().next().map(|key| key.0) else { return };
        waits.now = waits.now.max(next);
        let later = waits.waiting.split_off(&(next, u64::MAX));
        for (_, sender) in std::mem::replace(&mut waits.waiting, later) {
            let _ = sender.send(());
        }
    }
}

/// Everything that outlives a client.
pub struct Lab {
    pub server: Arc<ArmServer>,
    pub journal: Arc<Kept>,
    pub clock: Arc<QuietClock>,
    secret: tempfile::NamedTempFile,
    driver: tokio::task::JoinHandle<()>,
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// The path of the published image.
pub const IMAGE: &str =
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/galleries/hw/images/debian/versions/1.0.4";

const SUBNET: &str =
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/net/subnets/desks";

pub fn scope() -> Scope {
    Scope { subscription: "s".to_owned(), group: "g".to_owned(), region: "westeurope".to_owned() }
}

pub fn id(number: usize) -> MachineId {
    MachineId::parse(&format!("6f1e0c0a-5d3b-4f52-9d41-{number:012x}")).unwrap()
}

pub fn choice(size: &str, family: &str, place: Place) -> SizeChoice {
    SizeChoice {
        size: size.to_owned(),
        family: family.to_owned(),
        place,
        full_copy: false,
        accelerated_networking: true,
    }
}

pub fn spec(number: usize) -> MachineSpec {
    MachineSpec {
        computer_name: format!("desk-{number}"),
        scheme: "pool-a@3".to_owned(),
        image: IMAGE.to_owned(),
        os_disk_gib: 127,
        disk_tier: DiskTier::StandardSsd,
        choices: vec![choice("Standard_D8ds_v5", "standardDDSv5Family", Place::Temp)],
        zones: Vec::new(),
        subnet: SUBNET.to_owned(),
        security_group: None,
        admin_user: "hw".to_owned(),
        ssh_key: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ hw".to_owned(),
        custom_data: Some(b"#cloud-config\n".to_vec()),
        user_data: Some(format!("machine {number}").into_bytes()),
        trusted_launch: false,
        spot: false,
        host_group: None,
        tags: BTreeMap::new(),
    }
}

impl Lab {
    /// A subscription with one published image that has this number of replicas.
    pub async fn new(replicas: u32) -> Self {
        let secret = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(secret.path(), "secret").unwrap();
        let clock = Arc::new(QuietClock::default());
        let shown = clock.clone();
        let server = Arc::new(ArmServer::start_with(Arc::new(move || shown.now())).await);
        {
            let mut management = server.management();
            management.replication_looks = 0;
            let version = json!({"properties": {
                "provisioningState": "Succeeded",
                "publishingProfile": {"targetRegions": [{"name": "westeurope", "regionalReplicaCount": replicas}]},
            }});
            let definition = json!({"properties": {"provisioningState": "Succeeded", "osState": "Generalized", "hyperVGeneration": "V2"}});
            management.resources.insert(IMAGE.to_owned(), version);
            management.resources.insert(IMAGE.replace("/versions/1.0.4", ""), definition);
        }
        let driver = tokio::spawn(drive(server.clone(), clock.clone()));
        Self { server, journal: Arc::default(), clock, secret, driver }
    }

    pub fn arm(&self) -> Arc<Arm> {
        let http = HttpClient::new().unwrap();
        let pacer = || Pacer::new(PacerOptions::new(3), self.clock.clone());
        let url = || self.server.url.clone();
        let endpoints = Endpoints { authority: url(), management: url(), metadata: url() };
        let credential = Credential::ClientSecret {
            tenant: "tenant".to_owned(),
            client: "client".to_owned(),
            secret_file: self.secret.path().to_owned(),
        };
        let tokens = TokenSource::new(http.clone(), pacer(), self.clock.clone(), endpoints, credential);
        let (pacer, tokens) = (Arc::new(pacer()), Arc::new(tokens));
        let owner = "owner-a".to_owned();
        Arc::new(Arm::new(http, pacer, self.clock.clone(), tokens, self.journal.clone(), owner))
    }

    /// A new client, as after a start of the program.
    pub fn machines(&self) -> Machines {
        Machines::new(self.arm(), scope(), self.clock.clone())
    }

    /// The names of the machines and network interfaces that exist.
    pub fn there(&self) -> (Vec<String>, Vec<String>) {
        let management = self.server.management();
        let names = |kind: &str| {
            let paths = management.resources.keys().filter(|path| path.contains(kind));
            paths.filter_map(|path| path.rsplit('/').next()).map(str::to_owned).collect()
        };
        (names("/virtualMachines/"), names("/networkInterfaces/"))
    }

    pub fn elapsed(&self) -> Duration {
        self.clock.now()
    }
}

/// Advances the clock whenever no request came and no wait began for three milliseconds. All parts are on one thread,
/// so nothing is on its way then.
async fn drive(server: Arc<ArmServer>, clock: Arc<QuietClock>) {
    let (mut seen, mut quiet) = ((0, 0), 0);
    loop {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let now = (server.management().requests, clock.begun());
        quiet = if now == seen { quiet + 1 } else { 0 };
        seen = now;
        if quiet >= 3 {
            clock.advance();
            quiet = 0;
        }
    }
}
