//! The cases of the suite about hosts, their authority and the tokens with which they join.

use headwater_api::HostState;
use headwater_db::{AuthorityRecord, Database, DbError, HostRecord, JoinTokenRecord};
use uuid::Uuid;

pub async fn hosts_have_names_and_certificates_of_their_own(db: &dyn Database) {
    let host = |seed: u128, name: &str, fingerprint: Option<&str>| HostRecord {
        id: Uuid::from_u128(seed),
        name: name.to_owned(),
        fingerprint: fingerprint.map(str::to_owned),
        state: HostState::Joined,
        cordoned: false,
        memory_bytes: 8 << 30,
        cpus: 4,
        generation: 0,
        seen_event: 0,
        lease_ms: 30_000,
        joined_at_ms: 7,
        seen_at_ms: None,
    };
    let mut repo = db.write().await.unwrap();
    let mut first = host(1, "node-10", Some("aa"));
    for added in [&first, &host(2, "node-2", Some("bb")), &host(3, "own", None)] {
        repo.hosts().add(added).await.unwrap();
    }
    repo.save().await.unwrap();
    for taken in [host(1, "x", Some("cc")), host(4, "own", Some("cc")), host(4, "x", Some("bb"))] {
        let error = db.write().await.unwrap().hosts().add(&taken).await.unwrap_err();
        assert!(matches!(error, DbError::Taken { .. }), "{error:?}");
    }
    (first.state, first.cordoned, first.generation) = (HostState::Lost, true, 3);
    (first.seen_event, first.seen_at_ms, first.memory_bytes, first.cpus) = (12, Some(9), 1 << 30, 1);
    let mut repo = db.write().await.unwrap();
    assert!(repo.hosts().update(&first).await.unwrap());
    assert!(!repo.hosts().update(&host(5, "none", None)).await.unwrap());
    assert!(repo.hosts().remove(Uuid::from_u128(3)).await.unwrap());
    assert!(!repo.hosts().remove(Uuid::from_u128(3)).await.unwrap());
    repo.save().await.unwrap();
    let mut repo = db.read().await.unwrap();
    assert_eq!(repo.hosts().by_id(first.id).await.unwrap().as_ref(), Some(&first));
    assert_eq!(repo.hosts().by_id(Uuid::from_u128(3)).await.unwrap(), None);
    assert_eq!(repo.hosts().list().await.unwrap(), [host(2, "node-2", Some("bb")), first]);
}

pub async fn there_is_one_authority_of_nodes(db: &dyn Database) {
    let authority = |key: &str| AuthorityRecord { key: key.to_owned(), certificate: "public".to_owned() };
    let mut repo = db.write().await.unwrap();
    assert_eq!(repo.hosts().authority().await.unwrap(), None);
    repo.hosts().add_authority(&authority("first")).await.unwrap();
    repo.save().await.unwrap();
    let twice = db.write().await.unwrap().hosts().add_authority(&authority("second")).await.unwrap_err();
    assert!(matches!(twice, DbError::Taken { .. }), "{twice:?}");
    let mut repo = db.read().await.unwrap();
    let found = repo.hosts().authority().await.unwrap();
    assert_eq!(found, Some(authority("first")));
    assert!(!format!("{found:?}").contains("first"), "the key is shown");
}

pub async fn a_join_token_is_forgotten_after_its_end(db: &dyn Database) {
    let token = |hash: &str, expires_at_ms| JoinTokenRecord {
        hash: hash.to_owned(),
        created_by: "uid 0".to_owned(),
        created_at_ms: 1,
        expires_at_ms,
        used_by: None,
    };
    let mut repo = db.write().await.unwrap();
    repo.hosts().add_token(&token("a", 10), 0).await.unwrap();
    repo.hosts().use_token("a", "node-1").await.unwrap();
    repo.hosts().add_token(&token("b", 30), 10).await.unwrap();
    let used = JoinTokenRecord { used_by: Some("node-1".to_owned()), ..token("a", 10) };
    assert_eq!(repo.hosts().token("a").await.unwrap(), Some(used));
    repo.hosts().add_token(&token("c", 40), 11).await.unwrap();
    assert_eq!(repo.hosts().token("a").await.unwrap(), None);
    assert_eq!(repo.hosts().token("b").await.unwrap(), Some(token("b", 30)));
}
