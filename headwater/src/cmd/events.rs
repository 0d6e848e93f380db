//! `headwater events`: who changed what, and when.

use crate::cli::EventsArgs;
use crate::client::Client;
use crate::show;

/// Shows the history, oldest first, as a log reads.
pub async fn run(client: Client, args: EventsArgs, json: bool) -> anyhow::Result<u8> {
    let list = client.events(args.subject.as_deref(), args.limit).await?;
    if json {
        return show::json(&list).map(|()| 0);
    }
    let rows =
        list.events.into_iter().rev().map(|event| {
            vec![show::time(event.at_ms), event.actor, event.subject, event.action, event.detail]
        });
    show::table(&["TIME", "WHO", "WHAT", "ACTION", "DETAIL"], rows)?;
    Ok(0)
}
