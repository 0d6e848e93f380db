//! The cases of the suite about connections to clouds, and what is there.

use headwater_api::{
    CloudMachine, CloudScheme, Connection, ConnectionAuth, MachineState, PublishState, PublishedImage,
};
use headwater_db::{
    CatalogRecord, CloudOperation, ConnectionRecord, Database, DbError, IN_A_CLOUD, MachineRecord, Secret,
};
use uuid::Uuid;

use crate::suite::{catalog, machine};

pub fn connection(name: &str) -> ConnectionRecord {
    ConnectionRecord {
        connection: Connection {
            name: name.to_owned(),
            subscription: "11111111-2222-3333-4444-555555555555".to_owned(),
            tenant: "contoso.example".to_owned(),
            group: "headwater".to_owned(),
            region: "westeurope".to_owned(),
            auth: ConnectionAuth::Secret,
            client_id: Some("app".to_owned()),
            authority: "https://login.example".to_owned(),
            management: "https://management.example".to_owned(),
            created_by: "uid 0".to_owned(),
            created_at_ms: 5,
        },
        owner: "1b4e28ba-2fa1-11d2-883f-0016d3cca427".to_owned(),
        secret: Some(Secret::new("a client secret".to_owned())),
    }
}

fn published(image: &str, version: u64) -> PublishedImage {
    PublishedImage {
        image: image.to_owned(),
        version,
        hash: "ab".repeat(32),
        connection: "prod".to_owned(),
        state: PublishState::Publishing,
        generation: 2,
        replicas: 3,
        resource: format!("/subscriptions/s/images/{image}/versions/1.0.{version}"),
        created_by: "uid 0".to_owned(),
        created_at_ms: 7,
    }
}

/// A connection comes back with its secret; a list has no secrets.
pub async fn connections_are_stored_whole(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    let prod = connection("prod");
    repo.clouds().add(&prod).await.unwrap();
    let mut lab = connection("lab-2");
    (lab.secret, lab.connection.auth, lab.connection.client_id) = (None, ConnectionAuth::Identity, None);
    repo.clouds().add(&lab).await.unwrap();
    assert!(matches!(repo.clouds().add(&prod).await, Err(DbError::Taken { .. })));
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    assert_eq!(repo.clouds().by_name("prod").await.unwrap(), Some(prod.clone()));
    assert_eq!(repo.clouds().by_name("lab-2").await.unwrap(), Some(lab.clone()));
    assert_eq!(repo.clouds().by_name("lab").await.unwrap(), None);
    let unread = ConnectionRecord { secret: Some(Secret::unread()), ..prod };
    assert_eq!(repo.clouds().list().await.unwrap(), [lab, unread]);
    let other = Secret::new("another secret".to_owned());
    assert!(repo.clouds().set_secret("prod", &other).await.unwrap());
    assert!(!repo.clouds().set_secret("nothing", &other).await.unwrap());
    let changed = repo.clouds().by_name("prod").await.unwrap().unwrap();
    assert_eq!(changed.secret, Some(other));
    assert!(repo.clouds().remove("prod").await.unwrap());
    assert!(!repo.clouds().remove("prod").await.unwrap());
}

/// A published version has one row in each connection, which goes before the connection can go.
pub async fn published_versions_are_kept_until_removed(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    repo.clouds().add(&connection("prod")).await.unwrap();
    for (image, version) in [("debian", 10), ("debian", 9), ("alpine", 1)] {
        repo.clouds().set_published(&published(image, version)).await.unwrap();
    }
    let ready = PublishedImage { state: PublishState::Published, replicas: 5, ..published("debian", 9) };
    repo.clouds().set_published(&ready).await.unwrap();
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    let all = repo.clouds().published().await.unwrap();
    assert_eq!(all, [published("alpine", 1), ready.clone(), published("debian", 10)]);
    drop(repo);
    let mut repo = db.write().await.unwrap();
    assert!(repo.clouds().remove("prod").await.is_err(), "versions are published there");
    drop(repo);
    let mut repo = db.write().await.unwrap();
    for one in all {
        assert!(repo.clouds().remove_published(&one).await.unwrap());
    }
    assert!(!repo.clouds().remove_published(&ready).await.unwrap());
    assert!(repo.clouds().remove("prod").await.unwrap());
}

/// A machine in a cloud is in no list of a host's machines. Its connection stays as long as its catalog.
pub async fn machines_in_clouds_have_no_host(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    repo.clouds().add(&connection("prod")).await.unwrap();
    let text = r#"{"connection":"prod","size":"Standard_D8ds_v5","subnet":"/subscriptions/s","ssh_key":"ssh-rsa A"}"#;
    let class = CatalogRecord { cloud: CloudScheme::parse(text), ..catalog("class") };
    assert!(class.cloud.is_some());
    repo.catalogs().add(&class).await.unwrap();
    assert_eq!(repo.catalogs().by_name("class").await.unwrap(), Some(class.clone()));
    let mut desk = MachineRecord {
        host: IN_A_CLOUD,
        connection: Some("prod".to_owned()),
        image: class.image.clone(),
        catalog: Some("class".to_owned()),
        catalog_pin: class.pin.clone(),
        catalog_scheme: Some(class.scheme),
        ..machine("desk")
    };
    repo.machines().add(&desk).await.unwrap();
    repo.machines().add(&machine("local")).await.unwrap();
    desk.state = MachineState::Running;
    let (size, place, vm_id) = ("Standard_D8ds_v5".to_owned(), "temp".to_owned(), "v".to_owned());
    desk.cloud = Some(CloudMachine { size, zone: Some("2".to_owned()), place, vm_id });
    assert!(repo.machines().update_state(&desk).await.unwrap());
    assert_eq!(repo.machines().by_name("desk").await.unwrap(), Some(desk));
    let names = |list: Vec<MachineRecord>| list.into_iter().map(|it| it.name).collect::<Vec<_>>();
    assert_eq!(names(repo.machines().of_clouds().await.unwrap()), ["desk"]);
    assert_eq!(names(repo.machines().of_host(Uuid::from_u128(9)).await.unwrap()), ["local"]);
    assert!(repo.clouds().remove("prod").await.is_err(), "a catalog creates machines there");
}

/// Operations are listed in the order in which they were begun, until they end.
pub async fn cloud_operations_are_kept_until_they_end(db: &dyn Database) {
    let operation = |scope: &str, path: &str| CloudOperation {
        connection: "prod".to_owned(),
        scope: scope.to_owned(),
        path: path.to_owned(),
        verb: "make".to_owned(),
        api_version: "2025-01-02".to_owned(),
        body_hash: "hash".to_owned(),
        operation: None,
    };
    let mut repo = db.write().await.unwrap();
    repo.clouds().add(&connection("prod")).await.unwrap();
    repo.clouds().add(&connection("lab")).await.unwrap();
    for path in ["/b", "/a", "/b"] {
        repo.clouds().begin_operation(&operation("one", path)).await.unwrap();
    }
    repo.clouds().begin_operation(&operation("other", "/b")).await.unwrap();
    let accepted = CloudOperation { operation: Some("https://poll".to_owned()), ..operation("one", "/a") };
    assert!(repo.clouds().operation_accepted(&accepted).await.unwrap());
    assert!(!repo.clouds().operation_accepted(&operation("one", "/c")).await.unwrap());
    let all = repo.clouds().operations("prod").await.unwrap();
    assert_eq!(all, [accepted.clone(), operation("one", "/b"), operation("other", "/b")]);
    assert_eq!(repo.clouds().operations("lab").await.unwrap(), []);
    for path in ["/b", "/nothing"] {
        repo.clouds().end_operation("prod", "one", path).await.unwrap();
    }
    assert_eq!(repo.clouds().operations("prod").await.unwrap(), [accepted, operation("other", "/b")]);

    let seen = [("/x".to_owned(), 5), ("/y".to_owned(), 6)];
    repo.clouds().set_orphans("prod", &seen).await.unwrap();
    repo.clouds().set_orphans("lab", &seen[..1]).await.unwrap();
    repo.clouds().set_orphans("prod", &seen[1..]).await.unwrap();
    assert_eq!(repo.clouds().orphans("prod").await.unwrap(), seen[1..]);
    assert_eq!(repo.clouds().orphans("lab").await.unwrap(), seen[..1]);
    // All of it goes with the connection.
    assert!(repo.clouds().remove("prod").await.unwrap());
    assert_eq!(repo.clouds().operations("prod").await.unwrap(), []);
    assert_eq!(repo.clouds().orphans("prod").await.unwrap(), []);
}
