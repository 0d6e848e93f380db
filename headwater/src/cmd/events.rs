//! `headwater events`: shows the history.

use headwater_api::{Event, EventList};

use crate::cli::EventsArgs;
use crate::client::Client;
use crate::show;

/// Shows the history, oldest first, like a log.
pub async fn run(client: Client, args: EventsArgs, json: bool) -> anyhow::Result<u8> {
    let list = client.events(args.subject.as_deref(), args.before, args.limit).await?;
    if args.follow {
        return follow(&client, list, args.subject.as_deref(), json).await;
    }
    let cut = u32::try_from(list.events.len()).is_ok_and(|given| given == args.limit);
    let oldest = list.events.last().map(|event| event.id);
    show(list, json)?;
    if let (false, true, Some(id)) = (json, cut, oldest) {
        show::aside(&format!("for older events: --before {id}\n"));
    }
    Ok(0)
}

/// Shows the existing events, and then each new one.
async fn follow(client: &Client, list: EventList, subject: Option<&str>, json: bool) -> anyhow::Result<u8> {
    let mut after = list.events.first().map_or(0, |event| event.id);
    for event in list.events.iter().rev() {
        show_line(event, json)?;
    }
    loop {
        for event in client.events_after(subject, after).await?.events {
            after = event.id;
            show_line(&event, json)?;
        }
    }
}

fn show_line(event: &Event, json: bool) -> anyhow::Result<()> {
    if json {
        return show::line(&serde_json::to_string(event)?);
    }
    let Event { at_ms, caller, subject, action, .. } = event;
    let text = format!("{}  {caller}  {subject}  {action}  {}", show::time(*at_ms), words_of(event));
    show::line(text.trim_end())
}

/// What happened. If the sentence does not say what a setting was before, the change does.
fn words_of(Event { action, detail, change, .. }: &Event) -> String {
    let lacks_before = match action.as_str() {
        "revoked" => false,
        "set" => !detail.contains(" -> "),
        _ => detail.is_empty(),
    };
    match change {
        Some(change) if lacks_before => change.in_words(),
        _ => detail.clone(),
    }
}

/// Shows events, oldest first.
pub fn show(list: EventList, json: bool) -> anyhow::Result<()> {
    if json {
        return show::json(&list);
    }
    let rows = list.events.into_iter().rev().map(|event| {
        let words = words_of(&event);
        vec![show::time(event.at_ms), event.caller, event.subject, event.action, words]
    });
    show::table(&["TIME", "WHO", "WHAT", "ACTION", "DETAIL"], rows)
}
