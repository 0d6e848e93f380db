//! The log lines at the end of connections.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::time::Duration;

use fixture::{Fixture, INITIATOR, Raw};
use headwater_iscsi::wire::text::put_pair;
use headwater_testkit::{Log, ReferenceDisk};
use rustix::net::sockopt;

/// Resets the connection, like a process that is killed, or open-iscsi when it need not log out.
fn reset(raw: Raw) {
    sockopt::set_socket_linger(&raw.stream, Some(Duration::ZERO)).unwrap();
}

#[test]
fn a_reset_ends_a_discovery_but_breaks_a_session() {
    let log = Log::of_details();
    let fixture = Fixture::new(ReferenceDisk::new(1 << 20));
    let mut raw = fixture.raw();
    let request = raw.login_request();
    let (answer, _) = raw.login(&request, &[("InitiatorName", INITIATOR), ("SessionType", "Discovery")]);
    assert_eq!((answer.status, answer.transit), (0, true));
    let request = raw.text_request();
    let mut text = Vec::new();
    put_pair(&mut text, "SendTargets", "All");
    raw.pdu(&request.encode(), &text);
    assert!(raw.take().text().is_final);
    reset(raw);
    fixture.wait_for_connections(0);
    let said = log.take();
    assert!(said.contains("the discovery is over") && !said.contains("WARN"), "{said}");
    // A name stays in one line, whatever its characters.
    for key in ["InitiatorName", "TargetName"] {
        let mut raw = fixture.raw();
        let request = raw.login_request();
        let forged = "x\n2026-01-01T00:00:00Z  WARN forged: a line";
        let names = if key == "TargetName" {
            vec![("InitiatorName", INITIATOR), (key, forged)]
        } else {
            vec![(key, forged)]
        };
        assert_ne!(raw.login(&request, &names).0.status, 0);
        drop(raw);
        fixture.wait_for_connections(0);
        let said = log.take();
        assert!(said.contains("'x\\n2026"), "{said}");
        assert!(!said.lines().any(|line| line.starts_with("2026-01-01T00:00:00Z")), "{said}");
    }
    reset(fixture.session(&[]));
    fixture.wait_for_connections(0);
    let said = log.take();
    assert!(said.contains("WARN") && said.contains("reset"), "{said}");
}
