//! The case of the suite about versions of schemes.

use headwater_api::scheme::KEPT_SCHEMES;
use headwater_api::{Filter, MachineSort, SchemeSettings};
use headwater_db::{Database, MachineRecord, SchemeRecord};

use crate::suite::{catalog, machine};

/// A version of a scheme is stored with its catalog, and a machine takes it whole.
pub async fn schemes_have_versions(db: &dyn Database) {
    let mut repo = db.write().await.unwrap();
    let lab = catalog("lab");
    repo.catalogs().add(&lab).await.unwrap();
    let first = SchemeRecord {
        catalog: "lab".to_owned(),
        version: 1,
        settings: lab.settings(),
        created_by: "uid 0".to_owned(),
        created_at_ms: 5,
    };
    assert!(repo.catalogs().add_scheme(&first).await.unwrap());
    assert!(
        !repo
            .catalogs()
            .add_scheme(&SchemeRecord { catalog: "x".to_owned(), ..first.clone() })
            .await
            .unwrap()
    );
    let member = MachineRecord { catalog: Some("lab".to_owned()), scheme: Some(1), ..machine("m") };
    repo.machines().add(&member).await.unwrap();
    repo.machines().add(&machine("loner")).await.unwrap();
    let settings = SchemeSettings { cpus: 9, user_data: None, ..first.settings.clone() };
    let second = SchemeRecord { version: 2, settings: settings.clone(), ..first.clone() };
    assert!(repo.catalogs().add_scheme(&second).await.unwrap());
    repo.save().await.unwrap();
    let mut repo = db.write().await.unwrap();
    assert_eq!(repo.catalogs().schemes("lab").await.unwrap(), [second, first.clone()]);
    let now = repo.catalogs().by_name("lab").await.unwrap().unwrap();
    assert_eq!((now.settings(), now.scheme), (settings.clone(), 2));
    let old = Filter::parse("scheme:old").unwrap();
    let found = repo.machines().page(&old, MachineSort::Name, None, 9).await.unwrap();
    assert!(found.len() == 1 && found[0].name == "m" && found[0].has_old_scheme(), "{found:?}");
    let mut member = repo.machines().by_name("m").await.unwrap().unwrap();
    assert!(member.identity.user_data.is_some() && member.catalog_scheme == Some(2));
    member.take_settings(settings.clone(), Some(2));
    assert!(repo.machines().set_scheme(&member).await.unwrap());
    assert_eq!(repo.machines().by_name("m").await.unwrap(), Some(member.clone()));
    member.take_settings(first.settings.clone(), Some(1));
    assert!(repo.machines().set_scheme(&member).await.unwrap());
    assert_eq!(repo.machines().by_name("m").await.unwrap().unwrap().settings(), first.settings);
    // Old versions go, except those that a machine has.
    for version in 3..=KEPT_SCHEMES + 3 {
        let next = SchemeRecord { version, ..first.clone() };
        repo.catalogs().add_scheme(&next).await.unwrap();
    }
    let kept = repo.catalogs().schemes("lab").await.unwrap();
    let numbers: Vec<u32> = kept.iter().rev().take(3).map(|scheme| scheme.version).collect();
    assert_eq!((numbers, kept.len()), (vec![1, 4, 5], 101));
    repo.machines().remove(member.uuid).await.unwrap();
    assert!(repo.catalogs().remove("lab").await.unwrap());
    assert!(repo.catalogs().schemes("lab").await.unwrap().is_empty());
}
