//! Personality strings: which ones a guest gets.

use axum::http::Method;
use serde_json::{Value, json};

use super::claims::class;
use super::clouds::{add_desk, add_desks};
use super::schemes::ask;
use super::*;

/// The strings with which the last machine was started.
pub(super) fn newest(fixture: &Fixture) -> Value {
    json!(fixture.host.personalities.lock().unwrap().last().unwrap())
}

#[tokio::test]
async fn a_guest_reads_the_strings_of_its_machine_and_of_its_catalog() {
    let fixture = Fixture::new().await;
    class(&fixture, 2, 0).await;
    let (of_class, of_one) = ("/api/v1/catalogs/class/personality", "/api/v1/machines/class-1/personality");
    let set = async |path: &str, body: Value| ask(&fixture, Method::PATCH, path, body).await;
    let (status, answer) = set(of_class, json!({ "set": { "room": "7", "school": "north" } })).await;
    assert_eq!((status, &answer["strings"]["room"]), (200, &json!("7")), "{answer}");
    let (status, answer) = set(of_one, json!({ "set": { "room": "8", "seat": "1" } })).await;
    assert_eq!((status, &answer["of_catalog"]["school"]), (200, &json!("north")), "{answer}");
    for (name, strings) in [
        ("class-1", json!({ "room": "8", "school": "north", "seat": "1" })),
        ("class-2", json!({ "room": "7", "school": "north" })),
    ] {
        fixture.service.start(name, &Caller::daemon()).await.unwrap();
        assert_eq!(newest(&fixture), strings);
        let (_, shown) = ask(&fixture, Method::GET, &format!("/api/v1/machines/{name}"), Value::Null).await;
        assert_eq!(shown["identity"]["personality"], strings, "{shown}");
    }
    // The machine's own string hides that of the catalog no longer.
    let (status, answer) = set(of_one, json!({ "remove": ["room"] })).await;
    assert_eq!((status, &answer["strings"]), (200, &json!({ "seat": "1" })), "{answer}");
    fixture.service.reset("class-1", &Caller::daemon()).await.unwrap();
    assert_eq!(newest(&fixture)["room"], "7");
    let events = fixture.events().await;
    let change = events.iter().find(|event| event.detail == "personality: room").unwrap();
    assert_eq!(change.change.as_ref().unwrap().before["room"], "8");
    for (path, body, status) in [
        (of_one, json!({ "set": { "a=b": "" } }), 400),
        (of_one, json!({ "set": { "a": "x".repeat(1001) } }), 400),
        (of_one, json!({}), 400),
        (of_one, json!({ "remove": ["room"] }), 404),
        ("/api/v1/machines/nobody/personality", json!({ "set": { "a": "" } }), 404),
        ("/api/v1/catalogs/nobody/personality", json!({ "set": { "a": "" } }), 404),
    ] {
        let (answered, answer) = set(path, body).await;
        assert_eq!(answered, status, "{answer}");
    }
}

#[tokio::test]
async fn machines_in_a_cloud_get_no_strings() {
    let fixture = Fixture::new().await;
    add_desk(&fixture).await;
    add_desks(&fixture).await;
    for (path, expected) in [("machines/desk", 409), ("catalogs/desks", 400)] {
        let path = format!("/api/v1/{path}/personality");
        let (status, answer) = ask(&fixture, Method::PATCH, &path, json!({ "set": { "room": "7" } })).await;
        assert_eq!(status, expected, "{answer}");
        assert!(answer.to_string().contains("in the cloud of connection 'prod'"), "{answer}");
    }
}
