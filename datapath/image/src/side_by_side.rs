//! Runs a function for a few items concurrently, with a thread for each, if each call waits for a disk or a
//! server.

use std::io;

/// The results of `work` for each item, in order. Each item gets a thread with this name, so the caller must
/// limit their number.
pub(crate) fn side_by_side<T: Sync, R: Send>(
    name: &str,
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> io::Result<Vec<R>> {
    if let [only] = items {
        return Ok(vec![work(only)]);
    }
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = items
            .iter()
            .map(|item| {
                std::thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, move || work(item))
            })
            .collect::<io::Result<_>>()?;
        let panicked = |_| io::Error::other(format!("the thread '{name}' panicked"));
        threads.into_iter().map(|thread| thread.join().map_err(panicked)).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use parking_lot::{Condvar, Mutex};

    use super::*;

    #[test]
    fn all_items_run_concurrently_and_results_are_in_order() {
        let (came, comes) = (Mutex::new(0), Condvar::new());
        let done = side_by_side("meeting", &[1, 2, 3, 4], |item| {
            let mut came = came.lock();
            *came += 1;
            comes.notify_all();
            let late = comes.wait_while_for(&mut came, |came| *came < 4, Duration::from_secs(60));
            (item * 10, late.timed_out())
        });
        assert_eq!(done.unwrap(), [(10, false), (20, false), (30, false), (40, false)]);
        assert!(side_by_side("nobody", &[] as &[u8], |item| *item).unwrap().is_empty());
    }
}
