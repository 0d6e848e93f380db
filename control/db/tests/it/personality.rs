//! Personality strings of machines and catalogs, on both databases.

use std::collections::BTreeMap;

use headwater_db::Database;

use crate::suite::{catalog, machine};

pub async fn personality_strings_are_replaced(db: &dyn Database) {
    let strings = |pairs: &[(&str, &str)]| {
        let owned = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        owned.collect::<BTreeMap<_, _>>()
    };
    let (one, two) = (machine("one"), machine("two"));
    let mut repo = db.write().await.unwrap();
    for added in [&one, &two] {
        repo.machines().add(added).await.unwrap();
    }
    repo.catalogs().add(&catalog("lab")).await.unwrap();
    for room in ["7", "8"] {
        repo.personality()
            .set_of_machine(one.uuid, &strings(&[("room", room), ("Room", "\u{e4}")]))
            .await
            .unwrap();
    }
    repo.personality().set_of_catalog("lab", &strings(&[("room", "9")])).await.unwrap();
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    let of_one = repo.personality().of_machine(one.uuid).await.unwrap();
    assert_eq!(of_one, strings(&[("room", "8"), ("Room", "\u{e4}")]));
    assert_eq!(repo.personality().of_machine(two.uuid).await.unwrap(), strings(&[]));
    assert_eq!(repo.personality().of_catalog("lab").await.unwrap(), strings(&[("room", "9")]));
    // They go with their machine and their catalog.
    repo.machines().remove(one.uuid).await.unwrap();
    repo.catalogs().remove("lab").await.unwrap();
    assert_eq!(repo.personality().of_machine(one.uuid).await.unwrap(), strings(&[]));
    assert_eq!(repo.personality().of_catalog("lab").await.unwrap(), strings(&[]));
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    assert!(repo.personality().set_of_catalog("nowhere", &strings(&[("a", "")])).await.is_err());
}
