//! The audit: events whose hashes form a chain.

use headwater_api::Change;
use headwater_api::audit::{self, AuditCheck};
use headwater_db::{Database, NewEvent};

use crate::suite::event;

pub async fn the_audit_is_a_chain(db: &dyn Database) {
    let mut check = AuditCheck::default();
    let add = async |caller: &str, subject: &str| {
        let mut repo = db.write().await.unwrap();
        let event = NewEvent { caller: caller.to_owned(), ..event(subject, "it's \"\u{e9}\"\n") };
        repo.events().append(event.changing(Change::of("ram_bytes", 1, 2))).await.unwrap();
        repo.save().await.unwrap();
    };
    for (caller, subject) in
        [("uid 0", "machine a"), ("daemon", "machine a"), ("daemon", "image a"), ("uid 0", "image a")]
    {
        add(caller, subject).await;
    }
    let lines = async |after| {
        let lines = db.read().await.unwrap().events().audit(after, 2).await.unwrap();
        lines
            .iter()
            .map(|(event, hash)| (event.id, audit::line(hash, &audit::text_of(event))))
            .collect::<Vec<_>>()
    };
    let (mut after, mut seen) = (0, 0);
    loop {
        let page = lines(after).await;
        let Some((last, _)) = page.last() else { break };
        after = *last;
        for (_, line) in &page {
            check.add(line).unwrap();
            seen += 1;
        }
    }
    // Events of machines that the daemon itself wrote are left out.
    assert_eq!((seen, check.is_whole), (3, true));
    // An event of a unit that was not saved is not in the chain.
    let mut repo = db.write().await.unwrap();
    repo.events().append(event("image a", "lost")).await.unwrap();
    drop(repo);
    add("uid 0", "image b").await;
    let page = lines(after).await;
    assert_eq!(page.len(), 1);
    check.add(&page[0].1).unwrap();
}
