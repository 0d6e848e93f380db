//! `headwater task`: lists, follows and cancels tasks, which continue if their client disconnects.

use headwater_api::{DrainReport, RollReport, ScaleReport, Task, TaskResult};

use crate::cli::TaskCommand;
use crate::client::Client;
use crate::cmd::publish;
use crate::show::{self, progress::Shown};

/// Runs a command.
pub async fn run(client: Client, command: TaskCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        TaskCommand::List { unended, limit } => {
            let list = client.tasks(unended, limit).await?;
            if json { show::json(&list)? } else { show_list(&list.tasks)? }
        }
        TaskCommand::Show { task } => {
            let task = client.task(task).await?;
            if json { show::json(&task)? } else { show_one(&task)? }
        }
        TaskCommand::Wait { task } => follow(&client, task, json).await?,
        TaskCommand::Cancel { task } => {
            client.cancel_task(task).await?;
            let ended = follow(&client, task, json).await;
            // Its failure is expected, because it was cancelled.
            let task = client.task(task).await?;
            if !task.state.has_ended() {
                ended?;
            }
            if !json {
                show::line(&format!("task {} is {}", task.id, task.state))?;
            }
        }
    }
    Ok(0)
}

/// Shows a task's progress, and its result.
async fn follow(client: &Client, id: i64, json: bool) -> anyhow::Result<()> {
    let task = client.task(id).await?;
    let mut shown = Shown::begin(&format!("{} {}", task.kind, task.subject), json);
    let result = client.follow_task(id, |step| shown.update(step)).await;
    shown.end();
    let result = result?;
    if json { show::json(&result) } else { show_result(&result) }
}

/// The result of a task, in a few lines.
pub fn show_result(result: &TaskResult) -> anyhow::Result<()> {
    match result {
        TaskResult::Scaled(report) => show_scaled(report),
        TaskResult::Rolled(report) => show_rolled(report),
        TaskResult::Drained(report) => show_drained(report),
        TaskResult::Published(report) => publish::show_published(report),
        TaskResult::Unpublished(removed) => publish::show_unpublished(removed),
        TaskResult::Swept(report) => {
            show::line(&format!("swept {}: {} found", report.connection, report.orphans.len()))
        }
        TaskResult::Imported { version, .. } => {
            show::line(&format!("imported {}@{}", version.image, version.number))
        }
        TaskResult::Pulled(_) => show::line("pulled"),
        TaskResult::Verified(_) => show::line("verified"),
        TaskResult::Compared(_) => show::line("compared"),
        TaskResult::Sealed(_) => show::line("sealed"),
        TaskResult::Exported { version, .. } => {
            show::line(&format!("exported {}@{}", version.image, version.number))
        }
    }
}

/// The result of `catalog scale`.
pub fn show_scaled(report: &ScaleReport) -> anyhow::Result<()> {
    for (what, machines) in [("created", &report.created), ("removed", &report.removed)] {
        if !machines.is_empty() {
            show::line(&format!("{what} {}", machines.join(", ")))?;
        }
    }
    let machines = if report.count == 1 { "machine" } else { "machines" };
    show::line(&format!("{} has {} {machines}", report.catalog, report.count))
}

/// The result of `catalog roll`.
pub fn show_rolled(report: &RollReport) -> anyhow::Result<()> {
    for failed in &report.failed {
        show::line(&format!("failed: {} {}", failed.machine, failed.why))?;
    }
    for left in &report.left {
        show::line(&format!("not moved: {} {}", left.machine, left.why))?;
    }
    let (catalog, to) = (&report.catalog, &report.to);
    let moved = report.moved.len();
    let machines = if moved == 1 { "machine" } else { "machines" };
    show::line(&format!("{moved} {machines} of {catalog} moved from {} to {to}", report.from))?;
    if report.pinned {
        let what = format!("{catalog} is pinned to {to}; 'headwater image unpin {catalog}' removes the pin");
        show::line(&what)?;
    }
    Ok(())
}

/// The result of `node drain`.
fn show_drained(report: &DrainReport) -> anyhow::Result<()> {
    for moved in &report.moved {
        show::line(&format!("moved {} to {}", moved.machine, moved.to))?;
    }
    for left in &report.left {
        show::line(&format!("not moved: {} {}", left.machine, left.why))?;
    }
    let machines = if report.moved.len() == 1 { "machine" } else { "machines" };
    show::line(&format!(
        "{} {machines} moved from {}, which gets no new machines until 'headwater node uncordon {}'",
        report.moved.len(),
        report.host,
        report.host
    ))
}

fn progress(task: &Task) -> String {
    let Some(progress) = &task.progress else { return "-".to_owned() };
    match &progress.doing {
        Some(doing) => doing.clone(),
        None if progress.total_bytes == 0 => "-".to_owned(),
        None => format!("{} %", u128::from(progress.done_bytes) * 100 / u128::from(progress.total_bytes)),
    }
}

fn show_list(tasks: &[Task]) -> anyhow::Result<()> {
    let row = |task: &Task| {
        let said = task.problem.as_ref().map_or_else(|| progress(task), |problem| problem.message.clone());
        vec![
            task.id.to_string(),
            task.kind.clone(),
            task.subject.clone(),
            if task.cancelling && !task.state.has_ended() {
                "cancelling".to_owned()
            } else {
                task.state.to_string()
            },
            show::time(task.created_at_ms),
            task.caller.clone(),
            said,
        ]
    };
    show::table(&["TASK", "KIND", "ON", "STATE", "CREATED", "BY", "PROGRESS"], tasks.iter().map(row))
}

fn show_one(task: &Task) -> anyhow::Result<()> {
    let time = |ms: Option<u64>| ms.map_or_else(|| "-".to_owned(), show::time);
    show::pairs(&[
        ("task", task.id.to_string()),
        ("kind", task.kind.clone()),
        ("on", task.subject.clone()),
        ("by", task.caller.clone()),
        ("state", task.state.to_string()),
        ("progress", progress(task)),
        ("created", show::time(task.created_at_ms)),
        ("began", time(task.started_at_ms)),
        ("ended", time(task.ended_at_ms)),
    ])?;
    if let Some(problem) = &task.problem {
        show::line(&problem.to_string())?;
    }
    match &task.result {
        Some(result) => show_result(result),
        None => Ok(()),
    }
}
