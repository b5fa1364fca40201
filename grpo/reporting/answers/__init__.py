"""The handouts' questions that want words, answered from the result files: reports/answers.md."""
