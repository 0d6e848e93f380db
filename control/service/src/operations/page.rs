//! Limits the size of the answers of lists.

use serde::Serialize;

/// The most bytes of the rows of an answer as JSON.
const ANSWER_MAX_BYTES: usize = 200_000;

/// Keeps the first rows that fit into an answer, at least one.
pub(super) fn cut<T: Serialize>(rows: &mut Vec<T>) {
    let mut bytes = 0_usize;
    let does_not_fit = |row: &T| {
        // A row that cannot be serialised makes the answer itself fail.
        let len = serde_json::to_vec(row).map_or(0, |text| text.len());
        bytes = bytes.saturating_add(len).saturating_add(1);
        bytes > ANSWER_MAX_BYTES
    };
    if let Some(count) = rows.iter().position(does_not_fit) {
        rows.truncate(count.max(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_what_fits_and_at_least_one_row() {
        let mut rows = vec!["x".repeat(997); 500];
        cut(&mut rows);
        assert_eq!(rows.len(), 200);
        cut(&mut rows);
        assert_eq!(rows.len(), 200);
        let mut large = vec!["x".repeat(ANSWER_MAX_BYTES); 2];
        cut(&mut large);
        assert_eq!(large.len(), 1);
    }
}
