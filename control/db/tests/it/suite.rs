//! The behaviour of every database, written against the traits: `tests/it.rs` runs it on SQLite and on PostgreSQL.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use headwater_api::platform::{Display, Firmware, Network, Platform};
use headwater_api::{
    BootFrom, CacheMode, CacheSettings, Change, DiskTransport, Filter, FixedAddress, Hours, Identity,
    MachineSort, MachineState, OnHostLoss, Position, ResetOn, Role, Scopes, TaskState, Wanted,
};
use headwater_db::repository::{EventWindow, KEPT_RUNS, KEPT_SESSIONS};
use headwater_db::{
    CatalogRecord, ClaimRecord, Database, DbError, MachineRecord, NewEvent, NewTask, PersistentDisk,
    PoolRecord, Purpose, RunRecord, SECRETS_KEY_BYTES, Secret, SecretsKey, SessionRecord, TaskRecord,
    TokenRecord,
};
use uuid::Uuid;

pub use crate::audit::the_audit_is_a_chain;
pub use crate::clouds::{
    cloud_operations_are_kept_until_they_end, connections_are_stored_whole, machines_in_clouds_have_no_host,
    published_versions_are_kept_until_removed,
};
pub use crate::hosts::{
    a_join_token_is_forgotten_after_its_end, hosts_have_names_and_certificates_of_their_own,
    there_is_one_authority_of_nodes,
};
pub use crate::personality::personality_strings_are_replaced;
pub use crate::schemes::schemes_have_versions;

/// The key of the secrets in the databases of these tests.
pub fn key() -> SecretsKey {
    SecretsKey::new(&[7; SECRETS_KEY_BYTES]).unwrap()
}

pub fn machine(name: &str) -> MachineRecord {
    let seed = name.bytes().fold(7u128, |n, b| n.wrapping_mul(1_000_003).wrapping_add(u128::from(b)));
    MachineRecord {
        uuid: Uuid::from_u128(seed),
        name: name.to_owned(),
        host: Uuid::from_u128(9),
        connection: None,
        cloud: None,
        mac: format!("52:54:00:{:02x}:{:02x}:{:02x}", seed & 255, (seed >> 8) & 255, (seed >> 16) & 255),
        boot: BootFrom::Network,
        image: "debian@3".to_owned(),
        pin: Some("debian@2".to_owned()),
        catalog: None,
        catalog_pin: None,
        scheme: None,
        catalog_scheme: None,
        cache: CacheSettings {
            mode: CacheMode::RamDisk,
            ram_bytes: 64 << 20,
            disk_bytes: 10 << 30,
            weight: 300,
            persistent: true,
        },
        transport: DiskTransport::Nbd,
        memory_bytes: 512 << 20,
        cpus: 2,
        platform: platform(),
        identity: Identity {
            host_name: name.to_owned(),
            machine_id: "00112233445566778899aabbccddeeff".to_owned(),
            ssh_host_key_public: "ssh-ed25519 AAAA".to_owned(),
            address: None,
            user_data: Some("#cloud-config\n".to_owned()),
            personality: std::collections::BTreeMap::new(),
        },
        ssh_host_key_private: Secret::new("private".to_owned()),
        wanted: Wanted::Stopped,
        state: MachineState::Created,
        reason: None,
        version: None,
        kept: None,
        boot_ms: None,
        started_at_ms: None,
        fenced: false,
        to_start: false,
        on_host_loss: OnHostLoss::Wait,
        created_at_ms: 1_700_000_000_000,
    }
}

pub fn event(subject: &str, detail: &str) -> NewEvent {
    NewEvent {
        at_ms: 5,
        caller: "uid 0".to_owned(),
        subject: subject.to_owned(),
        action: "created".into(),
        detail: detail.to_owned(),
        change: None,
    }
}

/// Lists are ordered as people count.
pub async fn lists_are_ordered_as_people_count(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    for name in ["pc-10", "pc-2", "pc-1"] {
        repo.machines().add(&machine(name)).await.unwrap();
        let catalog = CatalogRecord { name: format!("room-{name}"), ..catalog("x") };
        repo.catalogs().add(&catalog).await.unwrap();
    }
    let machines = repo.machines().list().await.unwrap();
    assert_eq!(machines.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["pc-1", "pc-2", "pc-10"]);
    let catalogs = repo.catalogs().list().await.unwrap();
    let names: Vec<_> = catalogs.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["room-pc-1", "room-pc-2", "room-pc-10"]);
}

/// A machine comes back as it was stored; absent is `None`; the list is ordered by name, and has no secrets.
pub async fn machines_are_stored_whole(db: &dyn Database) {
    let (mut b, mut a) = (machine("b"), machine("a"));
    let gateway = Some(Ipv4Addr::new(10, 1, 2, 1));
    let address = FixedAddress { gateway, ..FixedAddress::parse("10.1.2.31/24").unwrap() };
    let ip = address.ip;
    b.identity.address = Some(address);
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&b).await.unwrap();
    repo.machines().add(&a).await.unwrap();
    repo.save().await.unwrap();

    let mut repo = db.read().await.unwrap();
    assert_eq!(repo.machines().by_name("a").await.unwrap().as_ref(), Some(&a));
    assert_eq!(repo.machines().by_uuid(b.uuid).await.unwrap().as_ref(), Some(&b));
    assert_eq!(repo.machines().by_name("c").await.unwrap(), None);
    assert_eq!(repo.machines().by_uuid(Uuid::nil()).await.unwrap(), None);
    assert_eq!(repo.machines().by_mac(&b.mac).await.unwrap().as_ref(), Some(&b));
    assert_eq!(repo.machines().by_mac("52:54:00:00:00:00").await.unwrap(), None);
    assert_eq!(repo.machines().by_ip(ip).await.unwrap().as_ref(), Some(&b));
    assert_eq!(repo.machines().by_ip(Ipv4Addr::new(10, 1, 2, 3)).await.unwrap(), None);
    for listed in [&mut a, &mut b] {
        listed.identity.user_data = None;
        listed.ssh_host_key_private = Secret::unread();
    }
    assert_eq!(repo.machines().list().await.unwrap(), [a, b]);
}

/// A second machine of one name is refused, and the transaction can go on.
pub async fn a_name_is_given_once(db: &dyn Database) {
    let first = machine("twin");
    let mut second = machine("other");
    second.name = "twin".to_owned();
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&first).await.unwrap();
    let refused = repo.machines().add(&second).await.unwrap_err();
    assert!(matches!(refused, DbError::Taken { .. }), "{refused:?}");
    repo.save().await.unwrap();
    let stored = db.read().await.unwrap().machines().by_name("twin").await.unwrap().unwrap();
    assert_eq!(stored.uuid, first.uuid);
}

/// What may change is updated; what may not stays; an unknown machine is told.
pub async fn state_is_updated(db: &dyn Database) {
    let mut changed = machine("m");
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&changed).await.unwrap();
    changed.state = MachineState::Crashed;
    changed.wanted = Wanted::Running;
    changed.reason = Some("exit status 1".to_owned());
    changed.version = Some("debian@3".to_owned());
    changed.kept = Some("debian@2".to_owned());
    changed.boot_ms = Some(1234);
    changed.started_at_ms = Some(u64::from(u32::MAX) * 1000);
    assert!(repo.machines().update_state(&changed).await.unwrap());
    assert!(!repo.machines().update_state(&machine("nobody")).await.unwrap());
    repo.save().await.unwrap();
    let stored = db.read().await.unwrap().machines().by_name("m").await.unwrap();
    assert_eq!(stored, Some(changed.clone()));

    let mut repo = db.write().await.unwrap();
    changed.cache.ram_bytes = 1 << 40;
    changed.cache.disk_bytes = 7;
    changed.cache.weight = 9;
    (changed.memory_bytes, changed.cpus) = (5 << 30, 3);
    changed.identity.ssh_host_key_public = "ssh-ed25519 BBBB".to_owned();
    changed.ssh_host_key_private = Secret::new("another key".to_owned());
    assert!(repo.machines().set_host_key(&changed).await.unwrap());
    assert!(!repo.machines().set_host_key(&machine("nobody")).await.unwrap());
    assert!(repo.machines().set_limits(&changed).await.unwrap());
    assert!(!repo.machines().set_limits(&machine("nobody")).await.unwrap());
    repo.save().await.unwrap();
    let stored = db.read().await.unwrap().machines().by_name("m").await.unwrap();
    assert_eq!(stored, Some(changed.clone()));

    let mut repo = db.write().await.unwrap();
    assert!(repo.machines().remove(changed.uuid).await.unwrap());
    assert!(!repo.machines().remove(changed.uuid).await.unwrap());
    repo.save().await.unwrap();
    assert_eq!(db.read().await.unwrap().machines().by_name("m").await.unwrap(), None);
}

/// A pin is set and taken away, and nothing else changes.
pub async fn pins_are_set_and_taken_away(db: &dyn Database) {
    let mut pinned = machine("m");
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&pinned).await.unwrap();
    assert!(repo.machines().set_pin(pinned.uuid, Some("debian@1")).await.unwrap());
    assert!(!repo.machines().set_pin(Uuid::nil(), None).await.unwrap());
    let moved = MachineRecord { host: Uuid::from_u128(8), wanted: Wanted::Running, ..pinned.clone() };
    let moved = MachineRecord { to_start: true, fenced: true, ..moved };
    assert!(repo.machines().set_fenced(pinned.uuid, true).await.unwrap());
    assert!(repo.machines().by_uuid(pinned.uuid).await.unwrap().unwrap().fenced);
    assert!(repo.machines().set_host(&moved).await.unwrap());
    let read = repo.machines().by_uuid(pinned.uuid).await.unwrap().unwrap();
    assert_eq!((read.host, read.wanted, read.kept, read.fenced), (moved.host, Wanted::Running, None, true));
    assert_eq!(repo.machines().to_start().await.unwrap().len(), 1);
    assert!(repo.machines().is_started(pinned.uuid).await.unwrap());
    assert!(repo.machines().to_start().await.unwrap().is_empty());
    repo.machines().set_host(&pinned).await.unwrap();
    assert!(!repo.machines().set_host(&MachineRecord { uuid: Uuid::nil(), ..moved }).await.unwrap());
    pinned.pin = Some("debian@1".to_owned());
    assert_eq!(repo.machines().by_name("m").await.unwrap(), Some(pinned.clone()));
    repo.machines().set_pin(pinned.uuid, None).await.unwrap();
    // A change of the state does not bring it back.
    repo.machines().update_state(&pinned).await.unwrap();
    pinned.pin = None;
    assert_eq!(repo.machines().by_name("m").await.unwrap(), Some(pinned));
}

/// Nothing of it is a default.
fn platform() -> Platform {
    Platform {
        firmware: Firmware::Uefi,
        secure_boot: true,
        tpm: true,
        display: Display::Vnc,
        network: Network::Bridge("br0".to_owned()),
        scratch_bytes: 8 << 30,
    }
}

pub fn catalog(name: &str) -> CatalogRecord {
    CatalogRecord {
        name: name.to_owned(),
        image: "debian:test".to_owned(),
        pin: None,
        scheme: 1,
        cache: CacheSettings { weight: 7, persistent: true, ..CacheSettings::default() },
        transport: DiskTransport::Nbd,
        memory_bytes: 1 << 30,
        cpus: 3,
        platform: platform(),
        user_data: Some("#!/bin/sh\n".to_owned()),
        name_rule: "web-##".to_owned(),
        first_number: 7,
        keep_ready: 3,
        ready_hours: Some(Hours::parse("mon-fri 07:00-19:00 Europe/Berlin").unwrap()),
        stop_idle_s: 600,
        seal_removes: vec!["/etc/licence key".to_owned(), "/srv/*.token".to_owned()],
        on_host_loss: OnHostLoss::Wait,
        cloud: None,
        created_at_ms: 5,
    }
}

/// A machine of a catalog boots what that says at the moment, unless it has a pin of its own.
pub async fn catalogs_say_what_their_machines_boot(db: &dyn Database) {
    let lab = catalog("lab");
    let mut member = MachineRecord { pin: None, catalog: Some("lab".to_owned()), ..machine("m") };
    let mut repo = db.write().await.unwrap();
    repo.catalogs().add(&lab).await.unwrap();
    repo.catalogs().add(&catalog("attic")).await.unwrap();
    assert!(matches!(repo.catalogs().add(&lab).await, Err(DbError::Taken { .. })));
    repo.machines().add(&member).await.unwrap();
    repo.machines().add(&machine("loner")).await.unwrap();
    assert_eq!(repo.catalogs().by_name("lab").await.unwrap(), Some(lab.clone()));
    assert_eq!(repo.catalogs().by_name("nobody").await.unwrap(), None);
    let names: Vec<String> = repo.catalogs().list().await.unwrap().into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["attic", "lab"]);
    let pool = |catalog: &CatalogRecord| PoolRecord {
        catalog: catalog.name.clone(),
        keep_ready: catalog.keep_ready,
        ready_hours: catalog.ready_hours.clone(),
        stop_idle_s: catalog.stop_idle_s,
    };
    assert_eq!(repo.catalogs().pools().await.unwrap(), [pool(&catalog("attic")), pool(&lab)]);
    let idle = PoolRecord { keep_ready: 0, ready_hours: None, ..pool(&catalog("attic")) };
    assert!(repo.catalogs().set_pool(&idle).await.unwrap());
    assert_eq!(repo.catalogs().pools().await.unwrap(), [idle.clone(), pool(&lab)]);
    assert!(repo.catalogs().set_pool(&PoolRecord { stop_idle_s: 0, ..idle.clone() }).await.unwrap());
    assert!(!repo.catalogs().set_pool(&PoolRecord { catalog: "nobody".to_owned(), ..idle }).await.unwrap());
    assert_eq!(repo.catalogs().pools().await.unwrap(), [pool(&lab)]);
    member.image = "debian:test".to_owned();
    member.catalog_scheme = Some(lab.scheme);
    assert_eq!(repo.machines().by_name("m").await.unwrap(), Some(member.clone()));
    assert_eq!(member.reference(), "debian:test");

    assert!(repo.catalogs().set_image("lab", "debian:production").await.unwrap());
    assert!(repo.catalogs().set_pin("lab", Some("debian@2")).await.unwrap());
    assert!(!repo.machines().by_uuid(member.uuid).await.unwrap().unwrap().may_restart_elsewhere());
    assert!(repo.catalogs().set_on_host_loss("lab", OnHostLoss::Restart).await.unwrap());
    let read = repo.machines().by_uuid(member.uuid).await.unwrap().unwrap();
    assert_eq!(read.on_host_loss, OnHostLoss::Restart);
    assert!(repo.catalogs().set_on_host_loss("lab", OnHostLoss::Wait).await.unwrap());
    assert!(!repo.catalogs().set_image("nobody", "x").await.unwrap());
    assert!(!repo.catalogs().set_pin("nobody", None).await.unwrap());
    let read = repo.machines().by_uuid(member.uuid).await.unwrap().unwrap();
    assert_eq!((read.image.as_str(), read.reference()), ("debian:production", "debian@2"));
    repo.machines().set_pin(member.uuid, Some("debian@9")).await.unwrap();
    let read = repo.machines().list().await.unwrap();
    assert_eq!(read.iter().map(MachineRecord::reference).collect::<Vec<_>>(), ["debian@2", "debian@9"]);

    assert!(repo.catalogs().set_seal_removes("lab", &["/srv/one".to_owned()]).await.unwrap());
    assert_eq!(repo.catalogs().by_name("lab").await.unwrap().unwrap().seal_removes, ["/srv/one"]);
    assert!(repo.catalogs().set_seal_removes("lab", &[]).await.unwrap());
    assert!(repo.catalogs().by_name("lab").await.unwrap().unwrap().seal_removes.is_empty());
    assert!(!repo.catalogs().set_seal_removes("nowhere", &[]).await.unwrap());

    repo.save().await.unwrap();

    // One with machines stays.
    assert!(db.write().await.unwrap().catalogs().remove("lab").await.is_err());
    let mut repo = db.write().await.unwrap();
    assert!(repo.catalogs().remove("attic").await.unwrap());
    assert!(!repo.catalogs().remove("attic").await.unwrap());
    repo.machines().remove(member.uuid).await.unwrap();
    assert!(repo.catalogs().remove("lab").await.unwrap());
}

/// One disk of a machine for each purpose, one edit of an image, and no machine goes while it has one.
pub async fn disks_are_kept_once(db: &dyn Database) {
    let (one, two) = (machine("one"), machine("two"));
    let disk = |id: u128, machine: &MachineRecord, purpose, image: &str| PersistentDisk {
        id: Uuid::from_u128(id),
        machine: machine.uuid,
        purpose,
        image: image.to_owned(),
        version: 4,
        hash: "ab".repeat(32),
        author: "uid 0".to_owned(),
        created_at_ms: 7,
        is_begun: false,
    };
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&one).await.unwrap();
    repo.machines().add(&two).await.unwrap();
    let persistent = disk(1, &one, Purpose::Persistent, "debian");
    let mut edit = disk(2, &one, Purpose::MaintenanceSession, "debian");
    repo.persistent_disks().add(&persistent).await.unwrap();
    repo.persistent_disks().add(&edit).await.unwrap();
    repo.persistent_disks().add(&disk(3, &two, Purpose::Persistent, "debian")).await.unwrap();
    for refused in [
        disk(4, &one, Purpose::Persistent, "other"),
        disk(5, &one, Purpose::MaintenanceSession, "other"),
        disk(6, &two, Purpose::MaintenanceSession, "debian"),
        disk(1, &two, Purpose::MaintenanceSession, "other"),
    ] {
        let outcome = repo.persistent_disks().add(&refused).await;
        assert!(matches!(outcome, Err(DbError::Taken { .. })), "{refused:?}: {outcome:?}");
    }
    assert_eq!(repo.persistent_disks().session_of("debian").await.unwrap().as_ref(), Some(&edit));
    assert_eq!(repo.persistent_disks().session_of("other").await.unwrap(), None);
    assert_eq!(
        repo.persistent_disks().of_machine(one.uuid).await.unwrap(),
        [edit.clone(), persistent.clone()]
    );
    assert_eq!(repo.persistent_disks().list().await.unwrap().len(), 3);
    repo.persistent_disks().begun(edit.id).await.unwrap();
    edit.is_begun = true;
    assert_eq!(
        repo.persistent_disks().of_machine(one.uuid).await.unwrap(),
        [edit.clone(), persistent.clone()]
    );
    repo.save().await.unwrap();
    assert!(db.write().await.unwrap().machines().remove(one.uuid).await.is_err());
    let mut repo = db.write().await.unwrap();
    assert!(repo.persistent_disks().remove(edit.id).await.unwrap());
    assert!(!repo.persistent_disks().remove(edit.id).await.unwrap());
    assert!(repo.persistent_disks().remove(persistent.id).await.unwrap());
    assert!(repo.machines().remove(one.uuid).await.unwrap());
}

/// A unit of work that is dropped leaves no trace, neither the machine nor its event.
pub async fn a_dropped_unit_of_work_did_nothing(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&machine("ghost")).await.unwrap();
    repo.events().append(event("machine ghost", "x")).await.unwrap();
    drop(repo);
    let mut repo = db.read().await.unwrap();
    assert_eq!(repo.machines().by_name("ghost").await.unwrap(), None);
    assert_eq!(repo.events().newest(None, 10).await.unwrap(), []);
}

/// An event keeps what it changed.
pub async fn an_event_keeps_what_it_changed(db: &dyn Database) {
    let change = Change::of("cpus", 1, 2).unwrap();
    let mut repo = db.write().await.unwrap();
    repo.events().append(event("machine a", "x")).await.unwrap();
    repo.events().append(event("machine a", "y").changing(Some(change.clone()))).await.unwrap();
    repo.save().await.unwrap();
    let mut repo = db.read().await.unwrap();
    let events = repo.events().newest(None, 2).await.unwrap();
    assert_eq!(events.into_iter().map(|event| event.change).collect::<Vec<_>>(), [Some(change), None]);
}

/// Events come newest first, by subject where asked, and never more than asked for.
pub async fn events_are_numbered_and_filtered(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    for n in 0..5 {
        repo.events()
            .append(event(if n % 2 == 0 { "machine a" } else { "machine b" }, &n.to_string()))
            .await
            .unwrap();
    }
    repo.save().await.unwrap();
    let mut repo = db.read().await.unwrap();
    let details =
        |events: Vec<headwater_api::Event>| events.into_iter().map(|e| e.detail).collect::<Vec<_>>();
    assert_eq!(details(repo.events().newest(None, 3).await.unwrap()), ["4", "3", "2"]);
    assert_eq!(details(repo.events().newest(Some("machine b"), 9).await.unwrap()), ["3", "1"]);
    let ids: Vec<i64> = repo.events().newest(None, 9).await.unwrap().iter().map(|e| e.id).collect();
    assert!(ids.is_sorted_by(|a, b| a > b));
    assert_eq!(details(repo.events().older(None, ids[1], 2).await.unwrap()), ["2", "1"]);
    assert_eq!(details(repo.events().older(Some("machine b"), ids[1], 9).await.unwrap()), ["1"]);
    assert_eq!(details(repo.events().older(None, ids[4], 9).await.unwrap()), [""; 0]);
    for (prefix, there) in
        [("machine ", true), ("machine b", true), ("a", false), ("machine c", false), ("z", false)]
    {
        assert_eq!(repo.events().any(prefix).await.unwrap(), there, "{prefix}");
    }
}

/// Many writers at once all succeed, and a reader is not kept waiting by one.
pub async fn writers_take_turns(db: Arc<dyn Database>) {
    let tasks: Vec<_> = (0..16)
        .map(|n| {
            let db = db.clone();
            tokio::spawn(async move {
                let mut repo = db.write().await.unwrap();
                let seen = repo.machines().list().await.unwrap().len();
                repo.machines().add(&machine(&format!("w{n}"))).await.unwrap();
                repo.events().append(event("machine w", &seen.to_string())).await.unwrap();
                repo.save().await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let mut writer = db.write().await.unwrap();
    writer.machines().add(&machine("open")).await.unwrap();
    let mut repo = db.read().await.unwrap();
    assert_eq!(repo.machines().list().await.unwrap().len(), 16);
    // Each writer saw exactly what the ones before it had saved: they were serialised.
    let seen: std::collections::BTreeSet<String> =
        repo.events().newest(None, 99).await.unwrap().into_iter().map(|e| e.detail).collect();
    assert_eq!(seen.len(), 16);
}

/// A machine has one claim, whose key no other claim has, and which goes with the machine.
pub async fn a_machine_has_one_claim(db: &dyn Database) {
    let (one, two) = (machine("one"), machine("two"));
    let claim = |machine: &MachineRecord, number: u128, key: &str| ClaimRecord {
        id: Uuid::from_u128(number),
        machine: machine.uuid,
        holder: "anna".to_owned(),
        key: Some(key.to_owned()),
        claimed_by: "uid 0".to_owned(),
        created_at_ms: u64::try_from(number).unwrap(),
        expires_at_ms: Some(9),
        reset_on: ResetOn::Logoff,
        ended: None,
    };
    let mut repo = db.write().await.unwrap();
    for machine in [&one, &two] {
        repo.machines().add(machine).await.unwrap();
    }
    let first = claim(&one, 1, "a");
    repo.claims().add(&first).await.unwrap();
    for twin in [claim(&one, 2, "b"), claim(&two, 2, "a"), claim(&two, 1, "b")] {
        assert!(matches!(repo.claims().add(&twin).await, Err(DbError::Taken { .. })));
    }
    let second = ClaimRecord { key: None, expires_at_ms: None, ..claim(&two, 2, "") };
    repo.claims().add(&second).await.unwrap();
    assert_eq!(repo.claims().list().await.unwrap(), [first.clone(), second.clone()]);
    assert!(repo.claims().end(first.id, "why").await.unwrap());
    assert!(!repo.claims().end(first.id, "again").await.unwrap());
    let ended = ClaimRecord { ended: Some("why".to_owned()), ..first.clone() };
    assert_eq!(repo.claims().list().await.unwrap(), [ended, second.clone()]);
    assert!(repo.claims().remove(first.id).await.unwrap() && !repo.claims().remove(first.id).await.unwrap());
    repo.machines().remove(two.uuid).await.unwrap();
    assert!(repo.claims().list().await.unwrap().is_empty());
}

/// A token comes back as it was stored, by its hash; its name and its hash are given once.
pub async fn tokens_are_found_by_their_hash(db: &dyn Database) {
    let token = |name: &str, hash: &str| TokenRecord {
        name: name.to_owned(),
        hash: hash.to_owned(),
        role: Role::Viewer,
        scopes: None,
        created_by: "uid 0".to_owned(),
        created_at_ms: 5,
        expires_at_ms: Some(1_900_000_000_000),
    };
    let mut repo = db.write().await.unwrap();
    repo.tokens().add(&token("grafana-10", "aa")).await.unwrap();
    repo.tokens().add(&token("grafana-9", "bb")).await.unwrap();
    for twin in [token("grafana-9", "cc"), token("other", "aa")] {
        assert!(matches!(repo.tokens().add(&twin).await, Err(DbError::Taken { .. })));
    }
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    assert_eq!(repo.tokens().by_hash("aa").await.unwrap(), Some(token("grafana-10", "aa")));
    assert_eq!(repo.tokens().by_hash("a").await.unwrap(), None);
    let all = repo.tokens().list().await.unwrap();
    assert_eq!(all, [token("grafana-9", "bb"), token("grafana-10", "aa")]);
    assert!(repo.tokens().remove("grafana-9").await.unwrap());
    assert!(!repo.tokens().remove("grafana-9").await.unwrap());
    assert_eq!(repo.tokens().by_hash("bb").await.unwrap(), None);
}

/// A token that is for some catalogs and images comes back as it was stored.
pub async fn scopes_are_stored(db: &dyn Database) {
    let scopes = Scopes { catalogs: vec!["class-*".to_owned()], images: vec!["debian".to_owned()] };
    let token = TokenRecord {
        name: "anna".to_owned(),
        hash: "aa".to_owned(),
        role: Role::Operator,
        scopes: Some(scopes),
        created_by: "uid 0".to_owned(),
        created_at_ms: 5,
        expires_at_ms: None,
    };
    let mut repo = db.write().await.unwrap();
    repo.tokens().add(&token).await.unwrap();
    assert_eq!(repo.tokens().by_hash("aa").await.unwrap(), Some(token));
}

/// The database leaves out the rows that [`Scopes`] does not have.
pub async fn lists_are_of_the_scopes_of_a_caller(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    let names = ["class", "class-2", "class_3", "lab"];
    for name in names {
        repo.catalogs().add(&CatalogRecord { image: "windows".to_owned(), ..catalog(name) }).await.unwrap();
        let member = MachineRecord { catalog: Some(name.to_owned()), ..machine(&format!("of-{name}")) };
        repo.machines().add(&member).await.unwrap();
        repo.events().append(event(&format!("catalog {name}"), "")).await.unwrap();
    }
    let images = ["debian", "debian:test", "debian@3", "test", "test@3", "a_b", "axb"];
    for (n, image) in images.into_iter().enumerate() {
        let loner = MachineRecord { image: image.to_owned(), created_at_ms: 4, ..machine(&format!("m{n}")) };
        repo.machines().add(&loner).await.unwrap();
        repo.events().append(event(&format!("image {image}"), "")).await.unwrap();
        repo.events().append(event(&format!("machine m{n}"), "")).await.unwrap();
    }
    repo.events().append(event("machine gone", "")).await.unwrap();
    repo.events().append(event("daemon", "")).await.unwrap();
    let machines = repo.machines().list().await.unwrap();
    let events = repo.events().newest(None, 100).await.unwrap();
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    for (catalogs, images) in [
        (&["class"][..], &["debian"][..]),
        (&["class-*"], &[]),
        (&["*"], &[]),
        (&[], &["*"]),
        (&[], &["*test"]),
        (&[], &["*3"]),
        (&[], &["d*"]),
        (&["lab", "cl*2"], &["a_b", "*bian"]),
        (&["nobody"], &["nobody"]),
    ] {
        let scopes = Scopes { catalogs: owned(catalogs), images: owned(images) };
        let own = Filter::default().within(Some(&scopes));
        let expected: Vec<_> = machines
            .iter()
            .filter(|machine| scopes.has_machine(machine.catalog.as_deref(), &machine.image))
            .cloned()
            .collect();
        let found = repo.machines().page(&own, MachineSort::Name, None, 100).await.unwrap();
        assert_eq!(found, expected, "{scopes}");
        assert_eq!(repo.machines().count(&own).await.unwrap(), u64::try_from(expected.len()).unwrap());
        let is_own = |subject: &str| match subject.split_once(' ') {
            Some(("catalog", name)) => scopes.has_catalog(name),
            Some(("image", reference)) => scopes.has_image(reference),
            Some(("machine", name)) => expected.iter().any(|machine| machine.name == name),
            _ => false,
        };
        let expected: Vec<_> = events.iter().filter(|event| is_own(&event.subject)).cloned().collect();
        let window = EventWindow::Before(i64::MAX);
        assert_eq!(repo.events().page(&own, None, window, 100).await.unwrap(), expected, "{scopes}");
    }
}

/// Sessions of the web console are kept up to a number, and end by age and by disuse.
pub async fn the_longest_unused_console_session_gives_way(db: &dyn Database) {
    let session = |n: i64| SessionRecord {
        hash: format!("hash-{n}"),
        principal: "uid 0".to_owned(),
        role: Role::Viewer,
        created_at_ms: 1000,
        used_at_ms: u64::try_from(1000 + n).unwrap(),
    };
    let mut repo = db.write().await.unwrap();
    for n in 0..KEPT_SESSIONS {
        repo.sessions().add(&session(n)).await.unwrap();
    }
    repo.sessions().used("hash-0", 5000).await.unwrap();
    repo.sessions().add(&session(KEPT_SESSIONS)).await.unwrap();
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    let used = SessionRecord { used_at_ms: 5000, ..session(0) };
    assert_eq!(repo.sessions().by_hash("hash-0").await.unwrap(), Some(used));
    assert_eq!(repo.sessions().by_hash("hash-1").await.unwrap(), None);
    assert!(repo.sessions().remove("hash-2").await.unwrap());
    assert!(!repo.sessions().remove("hash-2").await.unwrap());
    repo.sessions().remove_ended(1000, 1004).await.unwrap();
    assert_eq!(repo.sessions().by_hash("hash-3").await.unwrap(), None);
    assert_eq!(repo.sessions().by_hash("hash-4").await.unwrap(), Some(session(4)));
    repo.sessions().remove_ended(1001, 0).await.unwrap();
    assert_eq!(repo.sessions().by_hash("hash-4").await.unwrap(), None);
}

/// Runs are kept by catalog, up to a number, and go with their catalog.
pub async fn the_newest_runs_of_each_catalog_are_kept(db: &dyn Database) {
    let run = |catalog: &str, n: u64| RunRecord {
        catalog: catalog.to_owned(),
        machine: format!("{catalog}-{}", n % 7),
        began_at_ms: n,
        ended_at_ms: n + 1000,
        written_bytes: 1 << 40,
        spilled_bytes: n * 2,
        live_peak_bytes: n * 3,
        ram_peak_bytes: n * 5,
        disk_peak_bytes: n * 7,
        is_limited: n.is_multiple_of(3),
    };
    let kept = u64::try_from(KEPT_RUNS).unwrap();
    let mut repo = db.write().await.unwrap();
    repo.runs().add(&run("other", 0)).await.unwrap();
    for n in 0..kept + 5 {
        repo.runs().add(&run("class", n)).await.unwrap();
    }
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    let expected: Vec<RunRecord> = (5..kept + 5).rev().map(|n| run("class", n)).collect();
    assert_eq!(repo.runs().of_catalog("class").await.unwrap(), expected);
    repo.runs().remove_of_catalog("class").await.unwrap();
    assert_eq!(repo.runs().of_catalog("class").await.unwrap(), []);
    assert_eq!(repo.runs().of_catalog("other").await.unwrap(), [run("other", 0)]);
    repo.save().await.unwrap();
}

/// Tasks are numbered in order; one that ended is never changed; the newest ones are kept.
pub async fn tasks_are_kept_until_they_end_and_long_after(db: &dyn Database) {
    let new = |plan: Option<&str>| NewTask {
        kind: "roll",
        subject: "catalog class".to_owned(),
        caller: "uid 0".to_owned(),
        plan: plan.map(str::to_owned),
        created_at_ms: 5,
    };
    let mut repo = db.write().await.unwrap();
    let first = repo.tasks().add(&new(Some("{}"))).await.unwrap();
    let second = repo.tasks().add(&new(None)).await.unwrap();
    assert!(second > first);
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    let mut task = repo.tasks().by_id(first).await.unwrap().unwrap();
    assert_eq!((task.state, task.cancelling, task.plan.as_deref()), (TaskState::Waiting, false, Some("{}")));
    assert!(repo.tasks().cancel(first).await.unwrap());
    task.state = TaskState::Running;
    task.plan = Some("[1]".to_owned());
    task.progress = Some("{\"done\":1}".to_owned());
    task.started_at_ms = Some(6);
    assert!(repo.tasks().update(&task).await.unwrap());
    // An update does not take back that somebody wants it to end.
    task.cancelling = true;
    assert_eq!(repo.tasks().unended().await.unwrap()[0], task);
    task.state = TaskState::Cancelled;
    task.outcome = Some("{}".to_owned());
    task.ended_at_ms = Some(7);
    assert!(repo.tasks().update(&task).await.unwrap());
    assert!(!repo.tasks().update(&TaskRecord { ended_at_ms: None, ..task.clone() }).await.unwrap());
    assert!(!repo.tasks().cancel(first).await.unwrap());
    assert_eq!(repo.tasks().by_id(first).await.unwrap(), Some(task));
    let unended: Vec<_> = repo.tasks().unended().await.unwrap().iter().map(|task| task.id).collect();
    assert_eq!(unended, [second]);
    let ids = |tasks: Vec<TaskRecord>| tasks.iter().map(|task| task.id).collect::<Vec<_>>();
    assert_eq!(ids(repo.tasks().older(i64::MAX, 9).await.unwrap()), [second, first]);
    assert_eq!(ids(repo.tasks().older(i64::MAX, 1).await.unwrap()), [second]);
    assert_eq!(ids(repo.tasks().older(second, 9).await.unwrap()), [first]);
    assert_eq!(repo.tasks().by_id(second + 1).await.unwrap(), None);
}

/// Whoever reads forward from a number sees each later event once, in order.
pub async fn events_are_read_forward(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    for (subject, detail) in [("machine a", "1"), ("machine b", "2"), ("machine a", "3"), ("machine a", "4")]
    {
        repo.events().append(event(subject, detail)).await.unwrap();
    }
    repo.save().await.unwrap();
    let mut repo = db.read().await.unwrap();
    let mut after = 0;
    let mut seen = Vec::new();
    loop {
        let page = repo.events().newer(Some("machine a"), after, 2).await.unwrap();
        let Some(last) = page.last() else { break };
        after = last.id;
        seen.extend(page.into_iter().map(|event| event.detail));
    }
    assert_eq!(seen, ["1", "3", "4"]);
    assert_eq!(repo.events().newer(None, after - 2, 9).await.unwrap().len(), 2);
}

/// Whoever follows the history while others write, and some of them slowly, sees each event.
pub async fn no_event_is_missed_while_others_write(db: Arc<dyn Database>) {
    let follow = async |after: i64| db.read().await.unwrap().events().newer(None, after, 999).await.unwrap();
    // The first one to take a number is the last one to save.
    let mut slow = db.write().await.unwrap();
    slow.events().append(event("machine slow", "slow")).await.unwrap();
    let other = db.clone();
    let mut quick = tokio::spawn(async move {
        let mut repo = other.write().await.unwrap();
        repo.events().append(event("machine quick", "quick")).await.unwrap();
        repo.save().await.unwrap();
    });
    // As far as it comes without the slow one.
    let _ = tokio::time::timeout(Duration::from_millis(300), &mut quick).await;
    let first = follow(0).await;
    slow.save().await.unwrap();
    if !quick.is_finished() {
        quick.await.unwrap();
    }
    let last = first.last().map_or(0, |event| event.id);
    let seen: Vec<_> = first.into_iter().chain(follow(last).await).map(|event| event.detail).collect();
    assert_eq!(seen, ["slow", "quick"]);

    let after = follow(0).await.last().unwrap().id;
    let writers: Vec<_> = (0..8)
        .map(|writer| {
            let db = db.clone();
            tokio::spawn(async move {
                for n in 0..10 {
                    let mut repo = db.write().await.unwrap();
                    repo.events().append(event("machine w", &format!("{writer}.{n}"))).await.unwrap();
                    repo.save().await.unwrap();
                }
            })
        })
        .collect();
    let (mut seen, mut last) = (Vec::new(), after);
    while seen.len() < 80 {
        let is_over = writers.iter().all(tokio::task::JoinHandle::is_finished);
        let page = follow(last).await;
        last = page.last().map_or(last, |event| event.id);
        seen.extend(page.into_iter().map(|event| event.detail));
        assert!(!is_over || seen.len() == 80, "{} of 80 were seen", seen.len());
    }
}

/// Once a statement of a unit failed, nothing of it is saved, and that is said. A unit that finds a name taken goes on.
pub async fn a_failed_unit_is_not_saved_and_says_so(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&machine("before")).await.unwrap();
    let orphan = MachineRecord { catalog: Some("nowhere".to_owned()), ..machine("orphan") };
    let failed = repo.machines().add(&orphan).await.unwrap_err();
    assert!(!matches!(failed, DbError::Taken { .. }), "{failed:?}");
    assert!(matches!(repo.save().await, Err(DbError::StatementFailed)));
    assert_eq!(db.read().await.unwrap().machines().list().await.unwrap(), []);
}

/// A writer reads what the one before it saved, also if it began to wait before that one saved.
pub async fn a_writer_reads_what_the_one_before_it_saved(db: Arc<dyn Database>) {
    let mut first = db.write().await.unwrap();
    let other = db.clone();
    let mut second = tokio::spawn(async move {
        let mut repo = other.write().await.unwrap();
        repo.machines().by_name("first").await.unwrap().is_some()
    });
    // It waits by now.
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut second).await.is_err());
    first.machines().add(&machine("first")).await.unwrap();
    first.save().await.unwrap();
    assert!(second.await.unwrap());
}

/// A reader sees one state of the database, whatever is saved meanwhile.
pub async fn a_reader_sees_one_state(db: &dyn Database) {
    let mut reader = db.read().await.unwrap();
    assert_eq!(reader.machines().list().await.unwrap(), []);
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&machine("new")).await.unwrap();
    repo.save().await.unwrap();
    assert_eq!(reader.machines().list().await.unwrap(), []);
    assert_eq!(db.read().await.unwrap().machines().list().await.unwrap().len(), 1);
}

/// What a filter matches, in pages of two.
async fn pages(db: &dyn Database, filter: &str, sort: MachineSort) -> Vec<String> {
    let filter = Filter::parse(filter).unwrap();
    let mut repo = db.read().await.unwrap();
    let (mut names, mut after) = (Vec::new(), None);
    loop {
        let page = repo.machines().page(&filter, sort, after.as_ref(), 2).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some(match sort {
            MachineSort::State => Position::State(last.state, last.name.clone()),
            MachineSort::Boot => Position::Boot(last.boot_ms.unwrap_or(0), last.name.clone()),
            _ => Position::Name(last.name.clone()),
        });
        names.extend(page.into_iter().map(|machine| machine.name));
    }
    assert_eq!(repo.machines().count(&filter).await.unwrap(), names.len() as u64, "{filter:?}");
    names
}

/// Machines are filtered, sorted and cut into pages; what a filter does in memory it does in the database.
pub async fn machines_are_listed_in_pages(db: &dyn Database) {
    let states = [MachineState::Running, MachineState::Stopped, MachineState::Booting];
    let mut repo = db.write().await.unwrap();
    repo.catalogs()
        .add(&CatalogRecord { pin: Some("debian@2".to_owned()), ..catalog("class") })
        .await
        .unwrap();
    repo.catalogs().add(&catalog("odd_name%")).await.unwrap();
    for n in 1..=12_usize {
        let catalog = (n % 3 == 0).then(|| if n == 12 { "odd_name%" } else { "class" }.to_owned());
        let mut record = MachineRecord { catalog, pin: None, ..machine(&format!("pc-{n}")) };
        record.state = states[n % 3];
        record.boot_ms = (n % 2 == 0).then_some(n as u64 * 100 % 500);
        record.version = (n > 6).then(|| format!("debian@{n}"));
        record.memory_bytes = (n as u64) << 28;
        record.cache.persistent = n != 5;
        repo.machines().add(&record).await.unwrap();
        if n < 7 {
            let (id, purpose) = (
                Uuid::from_u128(n as u128),
                if n < 6 { Purpose::Persistent } else { Purpose::MaintenanceSession },
            );
            let (image, hash, author) = ("debian".to_owned(), String::new(), String::new());
            let disk = PersistentDisk {
                id,
                machine: record.uuid,
                purpose,
                image,
                version: 1,
                hash,
                author,
                created_at_ms: 0,
                is_begun: false,
            };
            repo.persistent_disks().add(&disk).await.unwrap();
        }
    }
    let holder = machine("pc-4").uuid;
    let (claimed_by, expires_at_ms) = ("uid 0".to_owned(), None);
    let claim = ClaimRecord {
        id: Uuid::from_u128(1),
        machine: holder,
        holder: "anna".to_owned(),
        key: None,
        claimed_by,
        created_at_ms: 0,
        expires_at_ms,
        reset_on: ResetOn::Shutdown,
        ended: None,
    };
    repo.claims().add(&claim).await.unwrap();
    repo.save().await.unwrap();

    let of = |numbers: &[u32]| numbers.iter().map(|n| format!("pc-{n}")).collect::<Vec<_>>();
    let all: Vec<u32> = (1..=12).collect();
    for (filter, numbers) in [
        ("", &all[..]),
        ("pc-1", &[1, 10, 11, 12]),
        ("name:pc-1*", &[1, 10, 11, 12]),
        ("name:PC-1", &[1]),
        ("-name:pc-1* state:running", &[3, 6, 9]),
        ("state:running,stopped memory>2.5G", &[12]),
        ("is:off", &[1, 4, 7, 10]),
        ("is:on catalog:*", &[3, 6, 9, 12]),
        ("catalog:class", &[3, 6, 9]),
        ("-catalog:class is:on", &[2, 5, 8, 11, 12]),
        ("catalog:odd_name%", &[12]),
        ("catalog:oddxname%", &[]),
        ("catalog:c%", &[]),
        ("is:pinned", &[3, 6, 9]),
        ("is:kept", &[1, 2, 3, 4]),
        ("is:editing,claimed", &[4, 6]),
        ("version:debian@1*", &[10, 11, 12]),
        ("-version:debian@*", &[1, 2, 3, 4, 5, 6]),
        ("image:debian:test", &[3, 6, 9, 12]),
        ("boot>=0.4", &[4]),
        ("boot<0.4 -boot<=0.1s", &[2, 8, 12]),
        ("-boot<100", &[1, 3, 5, 7, 9, 11]),
        ("mac:52:54:00:* boot:network cache:ram+disk memory<=512M", &[1, 2]),
    ] {
        assert_eq!(pages(db, filter, MachineSort::Name).await, of(numbers), "{filter}");
    }
    let by_state = pages(db, "", MachineSort::State).await;
    assert_eq!(by_state, of(&[2, 5, 8, 11, 3, 6, 9, 12, 1, 4, 7, 10]));
    let by_boot = pages(db, "is:on", MachineSort::Boot).await;
    assert_eq!(by_boot, of(&[8, 2, 12, 6, 3, 5, 9, 11]));
    let class = db.read().await.unwrap().machines().of_catalog("class").await.unwrap();
    assert_eq!(class.into_iter().map(|it| it.name).collect::<Vec<_>>(), of(&[3, 6, 9]));
}

/// Events and tasks are filtered too.
pub async fn events_and_tasks_are_filtered(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    for (subject, action, caller) in [
        ("machine pc-1", "created", "uid 0 (anna)"),
        ("machine pc-1", "start", "daemon"),
        ("image debian", "created", "daemon"),
        ("machine pc-2", "removed", "token bob"),
    ] {
        let (action, caller) = (action.into(), caller.to_owned());
        repo.events().append(NewEvent { action, caller, ..event(subject, "in WORDS") }).await.unwrap();
    }
    for (kind, subject) in [("roll", "catalog class"), ("import", "image debian"), ("roll", "catalog lab")] {
        let (subject, caller) = (subject.to_owned(), "uid 0".to_owned());
        repo.tasks().add(&NewTask { kind, subject, caller, plan: None, created_at_ms: 5 }).await.unwrap();
    }
    let ids: Vec<i64> =
        repo.events().newest(None, 9).await.unwrap().iter().map(|event| event.id).rev().collect();
    for (filter, subject, expected) in [
        ("", None, &[0, 1, 2, 3][..]),
        ("action:created", None, &[0, 2]),
        ("action:created", Some("image debian"), &[2]),
        ("subject:\"machine pc-*\" -caller:daemon", None, &[0, 3]),
        ("caller:\"uid 0 (anna)\"", None, &[0]),
        ("words", None, &[0, 1, 2, 3]),
        ("-pc-1", None, &[2, 3]),
    ] {
        let filter = Filter::parse_for_events(filter).unwrap();
        let found = repo.events().page(&filter, subject, EventWindow::After(0), 9).await.unwrap();
        let found: Vec<i64> = found.into_iter().map(|event| event.id).collect();
        assert_eq!(found, expected.iter().map(|n: &usize| ids[*n]).collect::<Vec<_>>(), "{filter:?}");
        let before = repo.events().page(&filter, subject, EventWindow::Before(i64::MAX), 9).await.unwrap();
        assert!(before.into_iter().map(|event| event.id).rev().eq(found));
    }
    for (filter, count) in [
        ("kind:roll", 2),
        ("state:waiting debian", 1),
        ("state:done,failed", 0),
        ("-kind:roll caller:uid*", 1),
    ] {
        let filter = Filter::parse_for_tasks(filter).unwrap();
        assert_eq!(repo.tasks().page(&filter, true, i64::MAX, 9).await.unwrap().len(), count, "{filter:?}");
    }
}

pub async fn what_a_machine_boots_is_replaced(db: &dyn Database) {
    let added = machine("m");
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&added).await.unwrap();
    assert!(repo.hosts().set_boot(added.uuid, "fedora", Some("fedora@1")).await.unwrap());
    assert!(!repo.hosts().set_boot(Uuid::from_u128(1), "fedora", None).await.unwrap());
    let changed = MachineRecord { image: "fedora".to_owned(), pin: Some("fedora@1".to_owned()), ..added };
    assert_eq!(repo.machines().by_name("m").await.unwrap(), Some(changed));
}

/// The age of a key goes with its machine, and the rule with its catalog.
pub async fn keys_have_an_age(db: &dyn Database) {
    let added = machine("m");
    let mut repo = db.write().await.unwrap();
    repo.machines().add(&added).await.unwrap();
    repo.catalogs().add(&catalog("lab")).await.unwrap();
    repo.catalogs().add(&catalog("attic")).await.unwrap();
    assert_eq!(repo.keys().made_at(added.uuid).await.unwrap(), None);
    for made_at_ms in [5, 7] {
        repo.keys().set_made_at(added.uuid, made_at_ms).await.unwrap();
    }
    for (name, after_s) in [("lab", 60), ("attic", 9), ("lab", 3600), ("attic", 0)] {
        repo.keys().set_rotate_after(name, after_s).await.unwrap();
    }
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    assert_eq!(repo.keys().made_at(added.uuid).await.unwrap(), Some(7));
    assert_eq!(repo.keys().rotate_after().await.unwrap(), [("lab".to_owned(), 3600)]);
    repo.machines().remove(added.uuid).await.unwrap();
    repo.catalogs().remove("lab").await.unwrap();
    assert_eq!(repo.keys().made_at(added.uuid).await.unwrap(), None);
    assert_eq!(repo.keys().rotate_after().await.unwrap(), []);
    repo.save().await.unwrap();
    let unknown = db.write().await.unwrap().keys().set_rotate_after("nowhere", 60).await;
    assert!(unknown.is_err());
}
