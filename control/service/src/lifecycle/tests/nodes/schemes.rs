//! Machines of other hosts, and the versions of the schemes of their catalogs.

use axum::http::Method;
use serde_json::json;

use super::*;
use crate::lifecycle::tests::schemes::ask;
pub(super) use crate::lifecycle::tests::schemes::first_of;

#[tokio::test]
async fn a_machine_of_a_node_takes_newer_settings_when_it_starts() {
    let pair = Pair::new().await;
    let _connection = pair.connect().await;
    let service = pair.controller.service.clone();
    let machine = pair.class_on("b", 1).await.remove(0);
    let daemon = Caller::daemon();
    until("a machine starts", async || service.start("class-1", &daemon).await.is_ok()).await;
    let set = json!({ "scheme": { "cpus": 3, "memory_bytes": 1 << 30, "user_data": "#!/bin/sh\n" } });
    let (status, catalog) = ask(&pair.controller, Method::PATCH, "/api/v1/catalogs/class", set).await;
    assert_eq!((status, &catalog["scheme_old"]), (200, &json!(["class-1"])), "{catalog}");
    let there = async || pair.node.service.record("class-1").await.unwrap();

    // A machine that is on has the settings with which it was started.
    service.reset("class-1", &daemon).await.unwrap();
    assert_eq!((there().await.cpus, there().await.scheme), (1, Some(1)));
    service.stop("class-1", true, &daemon).await.unwrap();
    service.start("class-1", &daemon).await.unwrap();
    let (far, near) = (there().await, service.record("class-1").await.unwrap());
    for record in [&far, &near] {
        assert_eq!((record.cpus, record.memory_bytes, record.scheme), (3, 1 << 30, Some(2)));
    }
    assert_eq!(far.uuid, machine.uuid);
    let far = pair.node.service.record_of(machine.uuid, "class-1").await.unwrap();
    assert_eq!(far.identity.user_data.as_deref(), Some("#!/bin/sh\n"));
    // A late answer of the node with the older version does not undo the newer one.
    let view = pair.node.service.view(MachineRecord { cpus: 1, scheme: Some(1), ..far });
    assert_eq!(crate::fleet::follow::as_said(near, &view).cpus, 3);
}
