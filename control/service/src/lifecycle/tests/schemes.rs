//! Versions of a catalog's settings, and the boots at which machines take them.

use axum::body::Body;
use axum::http::{Method, Request};
use headwater_db::{CatalogRecord, SchemeRecord};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};

use super::*;
use crate::fleet::node::OfController;
use crate::operations;

/// The first version of the scheme of a catalog.
pub(super) fn first_of(catalog: &CatalogRecord) -> SchemeRecord {
    SchemeRecord {
        catalog: catalog.name.clone(),
        version: catalog.scheme,
        settings: catalog.settings(),
        created_by: "token anna".to_owned(),
        created_at_ms: 0,
    }
}

/// The fixture, with its machine `lab` in the catalog `class`.
async fn in_catalog() -> Fixture {
    let fixture = Fixture::new().await;
    let lab = fixture.record().await;
    let catalog = CatalogRecord {
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
        name_rule: "class-##".to_owned(),
        first_number: 1,
        keep_ready: 0,
        ready_hours: None,
        stop_idle_s: 0,
        seal_removes: Vec::new(),
        on_host_loss: headwater_api::OnHostLoss::Wait,
        cloud: None,
        created_at_ms: 0,
    };
    let first = first_of(&catalog);
    let mut repo = fixture.db.write().await.unwrap();
    repo.machines().remove(lab.uuid).await.unwrap();
    repo.catalogs().add(&catalog).await.unwrap();
    repo.catalogs().add_scheme(&first).await.unwrap();
    let member = MachineRecord { catalog: Some("class".to_owned()), scheme: Some(1), ..lab };
    repo.machines().add(&member).await.unwrap();
    repo.save().await.unwrap();
    fixture
}

/// The status and the body of an answer to an administrator.
pub(super) async fn ask(fixture: &Fixture, method: Method, path: &str, body: Value) -> (u16, Value) {
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    let mut request = request.body(Body::from(body.to_string())).unwrap();
    request.extensions_mut().insert(OfController(Caller::admin("token anna")));
    let router = TowerToHyperService::new(operations::router(fixture.service.clone()));
    let answer = router.call(request).await.unwrap();
    let status = answer.status().as_u16();
    let body = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

/// Changes the scheme of the catalog `class`.
async fn set(fixture: &Fixture, scheme: Value) -> (u16, Value) {
    ask(fixture, Method::PATCH, "/api/v1/catalogs/class", json!({ "scheme": scheme })).await
}

#[tokio::test]
async fn a_machine_takes_the_newest_settings_when_it_boots() {
    let fixture = in_catalog().await;
    fixture.start().await.unwrap();
    let (status, catalog) =
        set(&fixture, json!({ "memory_bytes": 1 << 30, "user_data": "#!/bin/sh\n" })).await;
    assert_eq!((status, &catalog["scheme"]), (200, &json!(2)), "{catalog}");
    assert_eq!(catalog["scheme_old"], json!(["lab"]));
    let (_, machines) = ask(&fixture, Method::GET, "/api/v1/machines?filter=scheme:old", Value::Null).await;
    assert_eq!(machines["matching"], 1);
    let record = fixture.record().await;
    assert_eq!((record.memory_bytes, record.scheme), (1 << 29, Some(1)), "the machine is on");

    fixture.service.stop("lab", true, &Caller::daemon()).await.unwrap();
    assert_eq!(fixture.record().await.scheme, Some(1));
    fixture.start().await.unwrap();
    let record = fixture.record().await;
    assert_eq!((record.memory_bytes, record.scheme), (1 << 30, Some(2)));
    assert_eq!(record.identity.user_data.as_deref(), Some("#!/bin/sh\n"));
    let events = fixture.events().await;
    let details = |action: &str| {
        let found = events.iter().filter(|event| event.action == action);
        found.map(|event| format!("{}: {}", event.subject, event.detail)).collect::<Vec<_>>()
    };
    let changes = "memory_bytes 536870912 -> 1073741824, user_data none -> given";
    assert_eq!(details("scheme"), [format!("catalog class: version 2: {changes}")]);
    assert_eq!(details("scheme taken"), [format!("machine lab: version 1 -> 2: {changes}")]);
    // A second boot takes nothing.
    fixture.service.stop("lab", true, &Caller::daemon()).await.unwrap();
    fixture.start().await.unwrap();
    assert_eq!(fixture.events().await.iter().filter(|event| event.action == "scheme taken").count(), 1);
}

#[tokio::test]
async fn a_setting_of_one_machine_stays() {
    let fixture = in_catalog().await;
    let (status, answer) = ask(&fixture, Method::PATCH, "/api/v1/machines/lab", json!({ "cpus": 3 })).await;
    assert_eq!(status, 200, "{answer}");
    set(&fixture, json!({ "memory_bytes": 1 << 30, "cpus": 2 })).await;
    set(&fixture, json!({ "memory_bytes": 1_u64 << 31 })).await;
    fixture.start().await.unwrap();
    let record = fixture.record().await;
    assert_eq!((record.memory_bytes, record.cpus, record.scheme), (1 << 31, 3, Some(3)));
}

#[tokio::test]
async fn a_revert_is_a_new_version() {
    let fixture = in_catalog().await;
    set(&fixture, json!({ "cpus": 2 })).await;
    let (status, same) = set(&fixture, json!({ "cpus": 2 })).await;
    assert_eq!((status, &same["scheme"]), (200, &json!(2)), "settings that do not differ make no version");
    let revert = async |version: u32| {
        let path = "/api/v1/catalogs/class/scheme/revert";
        ask(&fixture, Method::POST, path, json!({ "version": version })).await
    };
    assert_eq!(revert(9).await.0, 404);
    let (status, catalog) = revert(1).await;
    assert_eq!((status, &catalog["scheme"], &catalog["cpus"]), (200, &json!(3), &json!(1)));
    let (_, list) = ask(&fixture, Method::GET, "/api/v1/catalogs/class/scheme", Value::Null).await;
    let rows: Vec<_> = list["versions"].as_array().unwrap().iter().collect();
    let numbers: Vec<_> = rows.iter().map(|row| row["version"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [3, 2, 1]);
    assert_eq!((&rows[2]["machines"], &rows[0]["created_by"]), (&json!(["lab"]), &json!("token anna")));
}

#[tokio::test]
async fn what_machines_cannot_take_is_refused_and_nothing_is_changed() {
    let fixture = in_catalog().await;
    let cache = fixture.record().await.cache;
    let kept = json!({ "cache": CacheSettings { persistent: true, ..cache } });
    let (status, answer) = set(&fixture, kept).await;
    assert!(
        status == 400 && answer["message"].as_str().unwrap().contains("whether write caches are persistent"),
        "{answer}"
    );
    assert_eq!(set(&fixture, json!({})).await.0, 400);
    let (status, _) =
        ask(&fixture, Method::PATCH, "/api/v1/catalogs/nobody", json!({ "scheme": { "cpus": 2 } })).await;
    assert_eq!(status, 404);
    let catalog = fixture.service.catalog("class").await.unwrap();
    assert_eq!((catalog.scheme, catalog.cache), (1, cache));
    assert!(fixture.events().await.is_empty());
}

#[tokio::test]
async fn a_boot_that_cannot_be_noted_takes_nothing() {
    let fixture = in_catalog().await;
    set(&fixture, json!({ "cpus": 2 })).await;
    fixture.db.full.store(true, Ordering::SeqCst);
    assert!(fixture.start().await.is_err());
    fixture.db.full.store(false, Ordering::SeqCst);
    let record = fixture.record().await;
    assert_eq!((record.cpus, record.scheme), (1, Some(1)));
    assert_eq!(fixture.events().await.iter().filter(|event| event.action == "scheme taken").count(), 0);
}

#[tokio::test]
async fn events_of_changes_have_the_fields_before_and_after_and_no_secrets() {
    let fixture = in_catalog().await;
    let done = async |method: Method, path: &str, body: Value| {
        let (status, answer) = ask(&fixture, method, path, body).await;
        assert!((200..300).contains(&status), "{path}: {answer}");
        answer
    };
    let catalog = "/api/v1/catalogs/class";
    let scheme = |text: &str| json!({ "scheme": { "user_data": text } });
    done(Method::PATCH, catalog, scheme("#!pa55-1")).await;
    done(Method::PATCH, catalog, scheme("#!pa55-2")).await;
    done(
        Method::PATCH,
        catalog,
        json!({ "stop_idle_s": 60, "seal_removes": ["/var/x"], "rotate_after_s": 86400 }),
    )
    .await;
    done(Method::PATCH, "/api/v1/machines/lab", json!({ "weight": 7 })).await;
    let token = json!({ "name": "reader", "role": "viewer" });
    let secret = done(Method::POST, "/api/v1/tokens", token).await["secret"].as_str().unwrap().to_owned();
    done(Method::DELETE, "/api/v1/tokens/reader", Value::Null).await;
    done(Method::POST, "/api/v1/images/image@1/promotion", json!({ "channel": "production" })).await;

    let events = fixture.events().await;
    let text = serde_json::to_string(&events).unwrap();
    assert!(!text.contains("pa55") && !text.contains(&secret), "{text}");
    assert!(!text.contains(&crate::token::hash_of(&secret)), "{text}");
    let changes: Vec<Value> =
        events.iter().rev().filter_map(|event| serde_json::to_value(event.change.as_ref()?).ok()).collect();
    let of = |field: &str, before: Value, after: Value| json!({ "before": { field: before }, "after": { field: after } });
    for expected in [
        of("user_data", Value::Null, "given".into()),
        of("user_data", "given".into(), "other".into()),
        of("stop_idle_s", 0.into(), 60.into()),
        of("seal_removes", json!([]), json!(["/var/x"])),
        of("rotate_after_s", 0.into(), 86400.into()),
        of("weight", 100.into(), 7.into()),
        of("production", Value::Null, 1.into()),
    ] {
        assert!(changes.contains(&expected), "{expected} is not in {changes:?}");
    }
    let of_token: Vec<_> = changes.iter().filter(|it| it["after"].get("role").is_some()).collect();
    assert_eq!(of_token.len(), 2, "{changes:?}");
    assert_eq!(
        (&of_token[0]["after"]["role"], &of_token[1]["before"]["role"]),
        (&"viewer".into(), &"viewer".into())
    );
    assert!(of_token[0]["before"]["role"].is_null() && of_token[1]["after"]["role"].is_null());
}
