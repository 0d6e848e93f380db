//! A fleet of many machines, with one controller and its nodes in this process.
//!
//! `make test` has a small fleet, and counts. The ignored test has 10,000 machines on 50 nodes, and prints times:
//! `cargo test --release -p headwater-service --lib -- --ignored --nocapture ten_thousand`.

use std::time::Instant;

use axum::http::Method;
use serde_json::{Value, json};

use super::*;
use crate::lifecycle::tests::schemes::ask;

/// A controller, and nodes with machines that are noted as on.
struct Fleet {
    pair: Pair,
    _nodes: Vec<Fixture>,
    _connections: Vec<JoinHandle<Result<(), Problem>>>,
}

/// A machine of the catalog `class`, as the controller has it.
fn member(lab: &MachineRecord, number: u64, host: Uuid) -> MachineRecord {
    let [.., a, b, c] = number.to_be_bytes();
    MachineRecord {
        uuid: Uuid::from_u128(u128::from(number) + (1 << 64)),
        name: format!("class-{number:05}"),
        host,
        mac: format!("02:00:00:{a:02x}:{b:02x}:{c:02x}"),
        catalog: Some("class".to_owned()),
        scheme: Some(1),
        wanted: Wanted::Running,
        state: if number.is_multiple_of(10) { MachineState::Booting } else { MachineState::Running },
        version: Some("image@1".to_owned()),
        ..lab.clone()
    }
}

async fn add_all(db: &FragileDatabase, machines: &[MachineRecord]) {
    let mut repo = db.write().await.unwrap();
    for machine in machines {
        repo.machines().add(machine).await.unwrap();
    }
    repo.save().await.unwrap();
}

impl Fleet {
    async fn new(nodes: u64, machines_each: u64) -> Self {
        let pair = Pair::new().await;
        pair.class_on("b", 0).await;
        // Nodes need not be told of fences.
        let mut repo = pair.controller.db.write().await.unwrap();
        repo.catalogs().set_on_host_loss("class", headwater_api::OnHostLoss::Wait).await.unwrap();
        repo.save().await.unwrap();
        let lab = pair.controller.record().await;
        let (mut connections, mut others) = (Vec::new(), Vec::new());
        for number in 0..nodes {
            let id = Uuid::from_u128(u128::from(number) + 1_000);
            let name = format!("h{number}");
            let node = pair.another_node(&name, id).await;
            let of_node = number * machines_each..(number + 1) * machines_each;
            let machines: Vec<_> = of_node.map(|number| member(&lab, number, id)).collect();
            add_all(&pair.controller.db, &machines).await;
            // A node knows no catalogs.
            let there = machines.into_iter().map(|it| MachineRecord { catalog: None, ..it });
            add_all(&node.db, &there.collect::<Vec<_>>()).await;
            connections.push(pair.connect_as(&node, &name).await);
            others.push(node);
        }
        Self { pair, _nodes: others, _connections: connections }
    }

    async fn list(&self, query: &str) -> Value {
        let path = format!("/api/v1/machines?{query}");
        let (status, list) = ask(&self.pair.controller, Method::GET, &path, Value::Null).await;
        assert_eq!(status, 200, "{list}");
        list
    }

    async fn set_scheme(&self, scheme: Value) -> Value {
        let body = json!({ "scheme": scheme });
        let (status, catalog) =
            ask(&self.pair.controller, Method::PATCH, "/api/v1/catalogs/class", body).await;
        assert_eq!(status, 200, "{catalog}");
        catalog
    }
}

/// The processor time of this process.
fn cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    // After the name, which may have blanks: the fields 14 and 15 are user and system time in ticks of 10 ms.
    let fields: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
    Duration::from_millis(10 * (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()))
}

#[tokio::test]
async fn lists_of_a_fleet_have_pages_and_a_scheme_is_of_all() {
    let fleet = Fleet::new(3, 20).await;
    let first = fleet.list("filter=catalog:class%20state:running&limit=30").await;
    let names = |list: &Value| -> Vec<String> {
        let machines = list["machines"].as_array().unwrap().iter();
        machines.map(|machine| machine["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!((&first["total"], &first["matching"]), (&json!(61), &json!(54)));
    let after = first["next"].as_str().unwrap();
    let second = fleet.list(&format!("filter=catalog:class%20state:running&limit=30&after={after}")).await;
    let expected: Vec<_> = (0..60).filter(|n| n % 10 != 0).map(|n| format!("class-{n:05}")).collect();
    assert_eq!([names(&first), names(&second)].concat(), expected);
    assert!(second["next"].is_null() && first["machines"][0]["host"] == "h0", "{second}");
    let catalog = fleet.set_scheme(json!({ "cpus": 2 })).await;
    assert_eq!(catalog["scheme_old"].as_array().unwrap().len(), 60);
    assert_eq!(fleet.list("filter=scheme:old&limit=1").await["matching"], 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "it takes minutes, and its times are for a quiet host"]
async fn ten_thousand_machines_on_fifty_nodes() {
    let began = Instant::now();
    let fleet = Fleet::new(50, 200).await;
    println!("made in {:?}", began.elapsed());
    let ticking = tokio::spawn({
        let service = fleet.pair.controller.service.clone();
        async move { service.keep_reconciling().await }
    });
    tokio::time::sleep(Duration::from_secs(5)).await;

    let (idle, before) = (Duration::from_secs(20), cpu());
    tokio::time::sleep(idle).await;
    let used = cpu().saturating_sub(before);
    println!(
        "idle: {:.1} % of one processor for the controller and 50 nodes",
        100.0 * used.as_secs_f64() / idle.as_secs_f64()
    );

    for query in [
        "filter=catalog:class%20state:running&limit=50",
        "filter=class-0*%20-state:booting&limit=50&sort=state",
        "filter=name:class-*7*&limit=50",
        "limit=50",
    ] {
        let mut times = Vec::new();
        for number in 0..200 {
            let page = format!("{query}&after=class-{:05}", number * 49);
            let query = if query.contains("sort=") { query } else { &page };
            let began = Instant::now();
            fleet.list(query).await;
            times.push(began.elapsed());
        }
        times.sort();
        println!("page {query}: median {:?}, p99 {:?}, longest {:?}", times[100], times[198], times[199]);
    }

    let began = Instant::now();
    let catalog = fleet.set_scheme(json!({ "cpus": 2 })).await;
    assert_eq!(catalog["scheme_old"].as_array().unwrap().len(), 10_000);
    println!("a change of the scheme of 10,000 machines: {:?}", began.elapsed());
    ticking.abort();
}
