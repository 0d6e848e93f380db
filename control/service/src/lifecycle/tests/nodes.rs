//! Machines of other hosts: two services with one connection between them, in this process.

mod figures;
mod many;
mod moves;
mod personality;
mod rolls;
mod schemes;

use headwater_api::name::ImageRef;
use headwater_api::{CreateMachine, HostState, Problem};
use headwater_db::JoinTokenRecord;
use tokio::io::DuplexStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::*;
use crate::fleet::Membership;
use crate::fleet::controller::{Authority, Issued, NodePeer};
use crate::fleet::protocol::{
    FromNode, JOIN_PREFIX, Join, PROTOCOL, ToNode, read_line, wait_until_ready, write_line,
};
use crate::operations::create_machine;
use crate::operations::hosts::accept_host;

/// Its certificates are the public keys of nodes.
struct PlainAuthority;

impl Authority for PlainAuthority {
    fn url(&self) -> String {
        "https://controller".to_owned()
    }

    fn fingerprint(&self) -> String {
        "a".repeat(64)
    }

    fn certificate(&self) -> String {
        "authority".to_owned()
    }

    fn issue(&self, _: &str, public_key: &str) -> Result<Issued, String> {
        Ok(Issued { certificate: public_key.to_owned(), fingerprint: public_key.to_owned() })
    }
}

/// A controller, a node, and what ends them.
struct Pair {
    controller: Fixture,
    node: Fixture,
    stop: watch::Sender<bool>,
}

impl Pair {
    /// A node that has joined as `b`, and is not connected.
    async fn new() -> Self {
        let (controller, mut node) = (Fixture::new().await, Fixture::new().await);
        let own = OwnHost { id: Uuid::from_u128(2), ..own_host() };
        node.service = Fixture::service_on(own, node.db.clone(), &node.host, node.dir.path());
        for fixture in [&controller, &node] {
            fixture.service.note_own_host().await.unwrap();
        }
        controller.service.accept_nodes(Arc::new(PlainAuthority));
        let pair = Self { controller, node, stop: watch::Sender::new(false) };
        let secret = pair.token().await;
        let answer = pair.join(&secret, "b", Uuid::from_u128(2), "key-b").await;
        assert!(matches!(answer, ToNode::Joined { .. }), "{answer:?}");
        let lease_file = pair.node.dir.path().join("lease.json");
        let (controller, name) = ("https://c".to_owned(), "b".to_owned());
        pair.node.service.is_node_of(Membership { controller, name, lease_file });
        pair
    }

    /// The secret of a new token, which ends after an hour.
    async fn token(&self) -> String {
        let secret = crate::token::new_secret(&SystemRandom, JOIN_PREFIX).unwrap();
        let now_ms = self.controller.service.now_ms();
        let token = JoinTokenRecord {
            hash: crate::token::hash_of(&secret),
            created_by: "anna".to_owned(),
            created_at_ms: now_ms,
            expires_at_ms: now_ms + 3_600_000,
            used_by: None,
        };
        let mut repo = self.controller.db.write().await.unwrap();
        repo.hosts().add_token(&token, 0).await.unwrap();
        repo.save().await.unwrap();
        secret
    }

    /// A stream whose other end the controller serves, as from a node with this certificate.
    fn dial(&self, fingerprint: Option<&str>) -> DuplexStream {
        let (near, far) = tokio::io::duplex(1 << 16);
        let peer = NodePeer { fingerprint: fingerprint.map(str::to_owned), address: "here".to_owned() };
        let (service, stop) = (self.controller.service.clone(), self.stop.subscribe());
        tokio::spawn(async move { service.serve_node(far, peer, stop).await });
        near
    }

    async fn join(&self, secret: &str, name: &str, host: Uuid, key: &str) -> ToNode {
        let mut stream = self.dial(None);
        let join = Join {
            protocol: PROTOCOL,
            secret: secret.to_owned(),
            name: name.to_owned(),
            host,
            public_key: key.to_owned(),
            memory_bytes: 64 << 30,
            cpus: 8,
        };
        wait_until_ready(&mut stream).await.unwrap();
        write_line(&mut stream, &FromNode::Join(join)).await.unwrap();
        read_line(&mut stream, "the controller").await.unwrap()
    }

    /// Connects the node, and waits until it is.
    async fn connect(&self) -> JoinHandle<Result<(), Problem>> {
        self.connect_as(&self.node, "key-b").await
    }

    async fn connect_as(&self, node: &Fixture, key: &str) -> JoinHandle<Result<(), Problem>> {
        let (stream, service, stop) = (self.dial(Some(key)), node.service.clone(), self.stop.subscribe());
        let connection = tokio::spawn(async move { service.serve_controller(stream, stop).await });
        let host = node.service.own_host();
        until("the node is connected", async || self.controller.service.link(host).is_some()).await;
        connection
    }

    /// Another node that has joined, and is not connected. Its certificate is its name.
    async fn another_node(&self, name: &str, id: Uuid) -> Fixture {
        let mut node = Fixture::new().await;
        let own = OwnHost { id, ..own_host() };
        node.service = Fixture::service_on(own, node.db.clone(), &node.host, node.dir.path());
        node.service.note_own_host().await.unwrap();
        let answer = self.join(&self.token().await, name, id, name).await;
        assert!(matches!(answer, ToNode::Joined { .. }), "{answer:?}");
        let lease_file = node.dir.path().join("lease.json");
        let (controller, name) = ("https://c".to_owned(), name.to_owned());
        node.service.is_node_of(Membership { controller, name, lease_file });
        node
    }

    /// Adds the catalog `class`, whose machines are started on other hosts, and makes so many of its machines on a host.
    async fn class_on(&self, host: &str, machines: usize) -> Vec<MachineRecord> {
        let lab = self.controller.record().await;
        let catalog = headwater_db::CatalogRecord {
            name: "class".to_owned(),
            image: "image".to_owned(),
            pin: None,
            scheme: 1,
            cache: lab.cache,
            transport: lab.transport,
            memory_bytes: lab.memory_bytes,
            cpus: lab.cpus,
            platform: lab.platform.clone(),
            user_data: None,
            name_rule: "class-#".to_owned(),
            first_number: 1,
            keep_ready: 0,
            ready_hours: None,
            stop_idle_s: 0,
            seal_removes: Vec::new(),
            on_host_loss: headwater_api::OnHostLoss::Restart,
            cloud: None,
            created_at_ms: 0,
        };
        let mut repo = self.controller.db.write().await.unwrap();
        repo.catalogs().add(&catalog).await.unwrap();
        repo.catalogs().add_scheme(&schemes::first_of(&catalog)).await.unwrap();
        repo.save().await.unwrap();
        let mut made = Vec::new();
        for number in 1..=machines {
            let request = format!(r#"{{"name":"class-{number}","catalog":"class","host":"{host}"}}"#);
            let request: CreateMachine = serde_json::from_str(&request).unwrap();
            let record = create_machine::make(&self.controller.service, &Caller::daemon(), request).await;
            made.push(record.map_err(|failure| failure.0).unwrap());
        }
        made
    }

    async fn create(&self, name: &str) -> Result<MachineRecord, Problem> {
        self.create_with(name, "").await
    }

    /// Creates a machine of the node with more settings.
    async fn create_with(&self, name: &str, settings: &str) -> Result<MachineRecord, Problem> {
        let request = format!(r#"{{"name":"{name}","image":"image","host":"b"{settings}}}"#);
        let request: CreateMachine = serde_json::from_str(&request).unwrap();
        let made = create_machine::make(&self.controller.service, &Caller::daemon(), request).await;
        made.map_err(|failure| failure.0)
    }

    async fn state(&self, name: &str) -> MachineState {
        let record = self.controller.service.record(name).await.unwrap();
        self.controller.service.full_view(record).await.unwrap().state
    }
}

fn why(answer: &ToNode) -> String {
    match answer {
        ToNode::Refused(problem) => problem.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_machine_of_a_node_is_changed_there_and_noted_here() {
    let pair = Pair::new().await;
    let refused = pair.create("far").await.unwrap_err();
    assert!(refused.to_string().contains("its node is not connected"), "{refused}");
    let _connection = pair.connect().await;
    pair.create("far").await.unwrap();
    let service = &pair.controller.service;
    let started = service.start("far", &Caller::admin("anna")).await.unwrap();
    assert_eq!((started.state, started.wanted), (MachineState::Booting, Wanted::Running));
    // It is on at the node alone.
    assert!(service.active(started.uuid).is_none() && pair.node.service.active(started.uuid).is_some());
    let there = pair.node.service.record("far").await.unwrap();
    assert_eq!((there.mac, there.ssh_host_key_private), (started.mac, started.ssh_host_key_private));
    // The guest switches itself off, and the history of both says who started it.
    pair.node.vm().end(VmExit::PoweredOff);
    until("that is noted", async || service.record("far").await.unwrap().state == MachineState::Stopped)
        .await;
    until("the history has it", async || {
        let events = pair.controller.events().await;
        events.iter().any(|it| {
            it.subject == "machine far" && it.action == "start" && it.caller == "anna by controller https://c"
        })
    })
    .await;
    service.remove("far", false, &Caller::daemon()).await.unwrap();
    assert!(pair.node.service.record("far").await.is_err() && service.record("far").await.is_err());
}

#[tokio::test]
async fn twenty_machines_of_a_lost_host_run_on_another_one() {
    let pair = Pair::new().await;
    let other = pair.another_node("c", Uuid::from_u128(3)).await;
    let service = &pair.controller.service;
    service.leases_last(1_000);
    let connection = pair.connect().await;
    let _other = pair.connect_as(&other, "c").await;
    for node in [&pair.node, &other] {
        let (node, stop) = (node.service.clone(), pair.stop.subscribe());
        tokio::spawn(async move { node.keep_fence(stop).await });
    }
    let mut repo = pair.controller.db.write().await.unwrap();
    let own = repo.hosts().by_id(own_host().id).await.unwrap().unwrap();
    repo.hosts().update(&headwater_db::HostRecord { cordoned: true, ..own }).await.unwrap();
    repo.save().await.unwrap();
    let machines = pair.class_on("b", 20).await;
    for machine in &machines {
        // A node that has just connected has no lease yet.
        until("a machine starts", async || service.start(&machine.name, &Caller::daemon()).await.is_ok())
            .await;
    }
    service.look_after_lost_hosts().await.unwrap();
    let on = |node: &Fixture| machines.iter().filter(|it| node.service.active(it.uuid).is_some()).count();
    assert_eq!((on(&pair.node), on(&other)), (20, 0));

    connection.abort();
    until("all machines run on the other host", async || {
        service.look_after_lost_hosts().await.unwrap();
        let (here, there) = (on(&pair.node), on(&other));
        assert!(
            here == 0 || there == 0,
            "{here} machines run on the lost host, and {there} on the other one"
        );
        there == 20
    })
    .await;
    let record = pair.node.service.record("class-1").await.unwrap();
    assert_eq!((record.state, record.wanted), (MachineState::Stopped, Wanted::Running));
    let refused = pair.node.service.start("class-1", &Caller::daemon()).await.unwrap_err();
    assert!(refused.to_string().contains("another host may run the machine"), "{refused}");
    until("nothing is left to start", async || {
        service.look_after_lost_hosts().await.unwrap();
        pair.controller.db.read().await.unwrap().machines().to_start().await.unwrap().is_empty()
    })
    .await;

    // The node is back, removes its copies, and starts none of them.
    let _connection = pair.connect().await;
    until("the copies are gone", async || pair.node.service.own_machines().await.unwrap().is_empty()).await;
    assert_eq!((on(&pair.node), on(&other)), (0, 20));
    let events = pair.controller.events().await;
    assert!(
        events.iter().any(|it| it.action == "moved" && it.detail.contains("'b', which is lost, to host 'c'"))
    );
}

#[tokio::test]
async fn nothing_of_another_host_is_recovered_or_stopped() {
    let pair = Pair::new().await;
    let connection = pair.connect().await;
    pair.create("far").await.unwrap();
    pair.controller.service.start("far", &Caller::daemon()).await.unwrap();
    pair.stop.send_replace(true);
    connection.await.unwrap().unwrap();
    pair.controller.service.stop_all(true).await;
    let again =
        Fixture::service(pair.controller.db.clone(), &pair.controller.host, pair.controller.dir.path());
    again.recover().await.unwrap();
    let record = again.record("far").await.unwrap();
    assert_eq!((record.state, record.wanted), (MachineState::Booting, Wanted::Running));
    assert!(pair.node.service.active(record.uuid).is_some());
    let error = again.stop("far", true, &Caller::daemon()).await.unwrap_err();
    assert!(error.to_string().contains("host 'b' is not connected"), "{error}");
}

#[tokio::test]
async fn a_host_that_is_silent_is_lost_and_comes_back() {
    let pair = Pair::new().await;
    let connection = pair.connect().await;
    pair.create("far").await.unwrap();
    pair.controller.service.start("far", &Caller::daemon()).await.unwrap();
    connection.abort();
    let state = async || {
        let mut repo = pair.controller.db.read().await.unwrap();
        repo.hosts().by_id(Uuid::from_u128(2)).await.unwrap().unwrap().state
    };
    until("the host is lost", async || state().await == HostState::Lost).await;
    assert_eq!(pair.state("far").await, MachineState::Unknown);
    let _connection = pair.connect().await;
    until("it is back", async || pair.state("far").await == MachineState::Booting).await;
}

#[tokio::test]
async fn joins_and_connections_are_refused_with_a_reason() {
    let pair = Pair::new().await;
    let id = Uuid::from_u128(3);
    let unknown = pair.join("hwj_x", "c", id, "key-c").await;
    assert!(why(&unknown).contains("there is no such join token"), "{unknown:?}");
    let secret = pair.token().await;
    let taken = pair.join(&secret, "b", id, "key-c").await;
    assert!(why(&taken).contains("there is a host 'b' already"), "{taken:?}");
    let copy = pair.join(&secret, "c", Uuid::from_u128(2), "key-c").await;
    assert!(why(&copy).contains("is that of host 'b', or a copy of it"), "{copy:?}");
    // None of that has used the token up.
    assert!(matches!(pair.join(&secret, "c", id, "key-c").await, ToNode::Joined { .. }));
    let used = pair.join(&secret, "d", Uuid::from_u128(4), "key-d").await;
    assert!(why(&used).contains("host 'c' has joined with this token"), "{used:?}");
    let late = pair.token().await;
    pair.controller.pass_ms(3_601_000);
    let late = pair.join(&late, "d", Uuid::from_u128(4), "key-d").await;
    assert!(why(&late).contains("the join token ended at"), "{late:?}");

    let refused = async |fingerprint| {
        let (stream, stop) = (pair.dial(fingerprint), pair.stop.subscribe());
        pair.node.service.serve_controller(stream, stop).await.unwrap_err().to_string()
    };
    assert!(refused(None).await.contains("no certificate"));
    assert!(refused(Some("key-x")).await.contains("was removed from the fleet"));
    assert!(refused(Some("key-c")).await.contains("the certificate is that of host 'c'"));
    let connection = pair.connect().await;
    assert!(refused(Some("key-b")).await.contains("a node of host 'b' is connected already, from here"));
    connection.abort();
    // A controller whose database is an old copy counts from there.
    until("it is not connected", async || pair.controller.service.fleet().connecting().is_empty()).await;
    let mut repo = pair.node.db.write().await.unwrap();
    let mut own = repo.hosts().by_id(Uuid::from_u128(2)).await.unwrap().unwrap();
    own.generation = 1000;
    repo.hosts().update(&own).await.unwrap();
    repo.save().await.unwrap();
    // However often it is tried: an attempt counts nothing.
    for _ in 0..3 {
        assert!(refused(Some("key-b")).await.contains("the controller's database is an old copy"));
    }
    let counted = {
        let mut repo = pair.controller.db.read().await.unwrap();
        repo.hosts().by_id(Uuid::from_u128(2)).await.unwrap().unwrap().generation
    };
    assert_eq!(counted, 1);
    // An admin lets it in, and it goes on counting from there.
    let host = crate::extract::Name("b".to_owned());
    let state = axum::extract::State(pair.controller.service.clone());
    let accepted = accept_host(state, Caller::admin("anna"), host).await;
    assert_eq!(accepted.map_err(|failure| failure.0).unwrap().0.name, "b");
    let _connection = pair.connect().await;
    let events = pair.controller.events().await;
    assert!(events.iter().any(|it| it.subject == "host b" && it.action == "accepted" && it.caller == "anna"));
}

#[tokio::test]
async fn a_machine_that_is_assigned_twice_is_there_once() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let record = pair.create("far").await.unwrap();
    let link = pair.controller.service.link(record.host).unwrap();
    for _ in 0..2 {
        pair.controller.service.assign(&link, &record).await.unwrap();
    }
    let there = pair.node.db.read().await.unwrap().machines().list().await.unwrap();
    assert_eq!(there.iter().filter(|machine| machine.uuid == record.uuid).count(), 1);
}

#[tokio::test]
async fn disks_that_nodes_keep_count_while_the_node_is_away() {
    let pair = Pair::new().await;
    let connection = pair.connect().await;
    let record = pair.create_with("far", r#","cache":{"mode":"ram+disk","ram_bytes":16777216,"disk_bytes":1073741824,"weight":100,"persistent":true}"#).await;
    let record = record.unwrap();
    let (service, caller) = (&pair.controller.service, Caller::daemon());
    service.start("far", &caller).await.unwrap();
    service.stop("far", true, &caller).await.unwrap();
    until("the controller knows that a disk is kept", async || {
        service.record("far").await.unwrap().kept.as_deref() == Some("image@1")
    })
    .await;
    connection.abort();
    until("the node is away", async || service.fleet().connecting().is_empty()).await;
    let view = service.full_view(service.record("far").await.unwrap()).await.unwrap();
    assert_eq!(view.kept.as_deref(), Some("image@1"));
    // The machine boots another image from now on, and its disk is over this version still.
    let mut repo = pair.controller.db.write().await.unwrap();
    repo.hosts().set_boot(record.uuid, "other", None).await.unwrap();
    repo.save().await.unwrap();
    let reference = ImageRef::parse("image@1").unwrap();
    let version = service.images().resolve(&reference).await.unwrap();
    let uses = crate::uses::of(service, &reference, Some(&version)).await.map_err(|e| e.0).unwrap();
    assert!(uses.contains(&"machine 'far' has a persistent disk over it".to_owned()), "{uses:?}");
}
