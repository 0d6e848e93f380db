//! Many machines on several nodes: a roll whose controller is killed in the middle, and a host that is lost with all its machines.
//!
//! The tests that are ignored have the numbers of machines of a large fleet. With `HEADWATER_FIGURES` in the environment, they write how long
//! that took to standard error.

use std::collections::BTreeMap;
use std::time::Instant;

use futures_util::future::join_all;
use headwater_api::{Batch, RollRequest, TaskState};
use tokio::runtime::Runtime;

use super::*;
use crate::tasks::begin_roll;

/// How many nodes have the machines.
const NODES: usize = 4;

/// How many machines are started at a time.
const AT_A_TIME: usize = 20;

/// A controller that is killed with its runtime, and nodes that outlive it.
struct Fleet {
    pair: Pair,
    nodes: Vec<Fixture>,
    machines: usize,
}

impl Fleet {
    /// Nodes with the machines of the catalog `class`, which run version 1 of their image. The controller is in the runtime.
    async fn new(runtime: &Runtime, machines: usize) -> Self {
        let pair = Pair::new().await;
        let mut nodes = Vec::new();
        for number in 1..=NODES {
            let id = Uuid::from_u128(100 + number as u128);
            nodes.push(pair.another_node(&format!("n{number}"), id).await);
        }
        let fleet = Self { pair, nodes, machines };
        let controller = &fleet.pair.controller.service;
        fleet.connect(runtime.handle(), controller).await;
        fleet.pair.class_on("own", 0).await;
        for number in 1..=machines {
            let host = format!("n{}", number % NODES + 1);
            let request = format!(r#"{{"name":"class-{number}","catalog":"class","host":"{host}"}}"#);
            let request: CreateMachine = serde_json::from_str(&request).unwrap();
            let made = create_machine::make(controller, &Caller::daemon(), request).await;
            made.map_err(|failure| failure.0).unwrap();
        }
        for first in (1..=machines).step_by(AT_A_TIME) {
            let names = (first..=machines).take(AT_A_TIME).map(|number| format!("class-{number}"));
            let starts = names.map(|name| async move { controller.start(&name, &Caller::daemon()).await });
            join_all(starts).await.into_iter().for_each(|started| drop(started.unwrap()));
        }
        for fixture in fleet.nodes.iter().chain([&fleet.pair.controller]) {
            fixture.host.versions.lock().unwrap().push(version(2, ""));
            fixture.host.boots.send_replace(true);
        }
        fleet
    }

    /// Connects all nodes to a controller whose side of the connections is in a runtime.
    async fn connect(&self, runtime: &tokio::runtime::Handle, controller: &Service) {
        for (node, number) in self.nodes.iter().zip(1..) {
            let (near, far) = tokio::io::duplex(1 << 16);
            let peer = NodePeer { fingerprint: Some(format!("n{number}")), address: "here".to_owned() };
            let (serving, stop) = (controller.clone(), self.pair.stop.subscribe());
            runtime.spawn(async move { serving.serve_node(far, peer, stop).await });
            let (service, stop) = (node.service.clone(), self.pair.stop.subscribe());
            tokio::spawn(async move { service.serve_controller(near, stop).await });
            let host = node.service.own_host();
            until("a node is connected", async || controller.link(host).is_some()).await;
        }
    }

    /// How often each machine was started on version 2, as the histories of the nodes say.
    async fn starts_on_new(&self) -> BTreeMap<String, usize> {
        let mut starts = BTreeMap::new();
        for node in &self.nodes {
            let events = node.db.read().await.unwrap().events().newer(None, 0, 100_000).await.unwrap();
            for event in events.into_iter().filter(|it| it.action == "start") {
                if event.detail.starts_with("image@2,") {
                    *starts.entry(event.subject).or_default() += 1;
                }
            }
        }
        starts
    }
}

/// Rolls so many machines, kills the controller in the middle, and lets another one go on.
async fn roll_with_a_killed_controller(machines: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let fleet = Fleet::new(&runtime, machines).await;
    let request = RollRequest {
        to: "image@2".to_owned(),
        canary: 2,
        batch: Batch::parse("10%").unwrap(),
        pause_s: 0,
        health: None,
        health_s: 60,
        boot_s: 600,
        max_failures: 0,
        at_ms: None,
        window: None,
        wait_idle_s: None,
        message: None,
        deadline_s: None,
    };
    let (service, admin) = (fleet.pair.controller.service.clone(), Caller::admin("anna"));
    let begun = runtime.spawn(async move { begin_roll(&service, admin, "class".to_owned(), request).await });
    begun.await.unwrap().map_err(|failure| failure.0).unwrap();
    until("a third is moved", async || fleet.starts_on_new().await.len() * 3 >= machines).await;
    let killed_at = Instant::now();
    // All that it does ends at once: nothing is noted, and its connections break.
    runtime.shutdown_background();
    let dir = fleet.pair.controller.dir.path();
    let db = database::FragileDatabase::open(&dir.join("db")).await;
    let task = async || db.read().await.unwrap().tasks().older(i64::MAX, 1).await.unwrap().remove(0);
    let before = task().await;
    assert_eq!(before.state, TaskState::Running);

    let next = Fixture::service_on(own_host(), db.clone(), &fleet.pair.controller.host, dir);
    next.accept_nodes(Arc::new(PlainAuthority));
    let left = next.left_tasks().await.unwrap();
    next.recover().await.unwrap();
    fleet.connect(&tokio::runtime::Handle::current(), &next).await;
    next.recover_tasks(left).await.unwrap();
    until("the other controller goes on", async || task().await.plan != before.plan).await;
    figure("from the end of the controller until another one goes on", killed_at.elapsed());
    until("the roll has ended", async || task().await.state != TaskState::Running).await;
    figure(
        &format!("from the end of the controller until {machines} machines are moved"),
        killed_at.elapsed(),
    );
    let ended = task().await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.outcome);
    let starts = fleet.starts_on_new().await;
    let twice: Vec<_> = starts.iter().filter(|(_, count)| **count != 1).collect();
    assert!(twice.is_empty(), "moved more than once: {twice:?}");
    assert_eq!(starts.len(), fleet.machines, "machines were forgotten");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_controller_goes_on_with_a_roll_and_moves_each_machine_once() {
    roll_with_a_killed_controller(24).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a figure, of a roll over 200 machines"]
async fn a_roll_of_200_machines_whose_controller_is_killed() {
    roll_with_a_killed_controller(200).await;
}

/// Loses a host with so many machines.
async fn lose_a_host(machines: usize) {
    const LEASE_MS: u64 = 1_000;
    let pair = Pair::new().await;
    let service = pair.controller.service.clone();
    service.leases_last(LEASE_MS);
    let connection = pair.connect().await;
    let fencing = tokio::spawn({
        let (node, stop) = (pair.node.service.clone(), pair.stop.subscribe());
        async move { node.keep_fence(stop).await }
    });
    let made = pair.class_on("b", machines).await;
    for machine in &made {
        until("a machine starts", async || service.start(&machine.name, &Caller::daemon()).await.is_ok())
            .await;
    }
    let started = async |machine: &MachineRecord| {
        let record = service.record(&machine.name).await.unwrap();
        assert!(!(service.active(record.uuid).is_some() && pair.node.service.active(record.uuid).is_some()));
        service.active(record.uuid).is_some()
    };
    connection.abort();
    until("the node has ended all", async || pair.node.service.active_map().is_empty()).await;
    let over_at = Instant::now();
    for machine in &made {
        until("it runs on the other host", async || {
            service.look_after_lost_hosts().await.unwrap();
            started(machine).await
        })
        .await;
    }
    figure(&format!("from the end of the lease until {machines} machines run elsewhere"), over_at.elapsed());
    fencing.abort();
}

#[tokio::test]
async fn all_machines_of_a_lost_host_run_elsewhere_and_never_twice() {
    lose_a_host(6).await;
}

#[tokio::test]
#[ignore = "a figure, of a host with 20 machines"]
async fn a_host_with_20_machines_is_lost() {
    lose_a_host(20).await;
}
