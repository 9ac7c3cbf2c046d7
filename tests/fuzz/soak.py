def main(bench, n):
    raise NotImplementedError
