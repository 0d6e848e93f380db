//! Personality strings of machines of other hosts.

use axum::http::Method;
use serde_json::{Value, json};

use super::*;
use crate::lifecycle::tests::personality::newest;
use crate::lifecycle::tests::schemes::ask;

#[tokio::test]
async fn a_node_gives_the_strings_of_the_controller_to_guests() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let service = pair.controller.service.clone();
    pair.class_on("b", 1).await;
    let set = async |path: &str, strings: Value| {
        let (status, answer) = ask(&pair.controller, Method::PATCH, path, json!({ "set": strings })).await;
        assert_eq!(status, 200, "{answer}");
    };
    set("/api/v1/catalogs/class/personality", json!({ "room": "7" })).await;
    let daemon = Caller::daemon();
    until("a machine starts", async || service.start("class-1", &daemon).await.is_ok()).await;
    assert_eq!(newest(&pair.node), json!({ "room": "7" }));
    set("/api/v1/machines/class-1/personality", json!({ "seat": "1" })).await;
    service.reset("class-1", &daemon).await.unwrap();
    assert_eq!(newest(&pair.node), json!({ "room": "7", "seat": "1" }));
    // A start at the node itself, without the controller.
    pair.node.service.stop("class-1", true, &daemon).await.unwrap();
    pair.node.service.start("class-1", &daemon).await.unwrap();
    assert_eq!(newest(&pair.node), json!({ "room": "7", "seat": "1" }));
    assert_eq!(pair.node.host.personalities.lock().unwrap().len(), 3);
}
