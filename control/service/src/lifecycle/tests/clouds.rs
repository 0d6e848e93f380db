//! Machines in clouds, beside the machines of a host.

use headwater_api::{CloudScheme, Connection, ConnectionAuth, ListedMachine, ScaleRequest, SetMachine};
use headwater_db::{CatalogRecord, ConnectionRecord, IN_A_CLOUD};

use super::claims::class;
use super::*;
use crate::tasks::begin_scale;

/// Adds a machine that is on in a cloud, and would need more memory than any host has.
pub(super) async fn add_desk(fixture: &Fixture) {
    let connection = Connection {
        name: "prod".to_owned(),
        subscription: "s".to_owned(),
        tenant: "t".to_owned(),
        group: "g".to_owned(),
        region: "westeurope".to_owned(),
        auth: ConnectionAuth::Identity,
        client_id: None,
        authority: "https://login.example".to_owned(),
        management: "https://management.example".to_owned(),
        created_by: "uid 0".to_owned(),
        created_at_ms: 0,
    };
    let desk = MachineRecord {
        uuid: Uuid::from_u128(77),
        name: "desk".to_owned(),
        mac: "52:54:00:00:00:77".to_owned(),
        host: IN_A_CLOUD,
        connection: Some("prod".to_owned()),
        memory_bytes: 1 << 50,
        wanted: Wanted::Running,
        state: MachineState::Running,
        ..fixture.record().await
    };
    let mut repo = fixture.db.write().await.unwrap();
    repo.clouds().add(&ConnectionRecord { connection, owner: String::new(), secret: None }).await.unwrap();
    repo.machines().add(&desk).await.unwrap();
    repo.save().await.unwrap();
}

/// Adds the catalog `desks`, whose machines are in the cloud, and the catalog `class`, whose machines are not.
pub(super) async fn add_desks(fixture: &Fixture) {
    class(fixture, 0, 0).await;
    let mut repo = fixture.db.write().await.unwrap();
    let hosted = repo.catalogs().by_name("class").await.unwrap().unwrap();
    let scheme =
        r#"{"connection":"prod","size":"s","subnet":"/subscriptions/s/x","ssh_key":"ssh-ed25519 AAAA a@b"}"#;
    let desks = CatalogRecord { name: "desks".to_owned(), cloud: CloudScheme::parse(scheme), ..hosted };
    repo.catalogs().add(&desks).await.unwrap();
    repo.save().await.unwrap();
}

#[tokio::test]
async fn a_list_with_an_address_for_a_cloud_makes_no_machine() {
    let fixture = Fixture::new().await;
    add_desk(&fixture).await;
    add_desks(&fixture).await;
    let listed = |line, name: &str, mac: Option<&str>| ListedMachine {
        line,
        name: name.to_owned(),
        mac: mac.map(str::to_owned),
        address: None,
    };
    let machines = vec![listed(2, "d-1", None), listed(3, "d-2", Some("52:54:00:77:00:01"))];
    let request = ScaleRequest { machines, ..ScaleRequest::default() };
    let begun = begin_scale(&fixture.service, Caller::admin("anna"), "desks".to_owned(), request).await;
    let refused = begun.err().unwrap().0;
    assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
    let mut repo = fixture.db.read().await.unwrap();
    assert!(repo.machines().by_name("d-1").await.unwrap().is_none());
    assert!(repo.tasks().unended().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_machine_in_a_cloud_is_no_machine_of_a_host() {
    let fixture = Fixture::new().await;
    fixture.service.recover().await.unwrap();
    let hosts = fixture.db.read().await.unwrap().hosts().list().await.unwrap();
    let before = fixture.service.candidates(&hosts).await.unwrap();
    add_desk(&fixture).await;
    assert_eq!(fixture.service.candidates(&hosts).await.unwrap(), before);
    assert_eq!(fixture.service.own_machines().await.unwrap().len(), 1);

    // The next daemon of the host neither misses it nor starts it.
    let next = fixture.another_service();
    next.recover().await.unwrap();
    next.resume().await;
    next.stop_all(false).await;
    let desk = next.record("desk").await.unwrap();
    assert_eq!((desk.state, desk.wanted), (MachineState::Running, Wanted::Running));

    let limits = SetMachine { cpus: Some(2), ..SetMachine::default() };
    let caller = Caller::daemon();
    let refusals = [
        next.set_limits("desk", limits, &caller).await.unwrap_err(),
        next.rotate("desk", &caller).await.unwrap_err(),
        next.start_recorded("desk", &caller).await.unwrap_err(),
        next.node_of("desk", "use").await.err().unwrap(),
    ];
    for refused in refusals {
        let said = refused.to_string();
        assert!(said.contains("'desk': it is in the cloud of connection 'prod'"), "{said}");
    }
}
